"""From runs to pages; nothing here knows the systems that the pages show."""
