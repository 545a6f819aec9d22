"""From runs to pages; of the systems that these show, only folders are known."""
