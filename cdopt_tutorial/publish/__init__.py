"""Everything that turns runs into pages; it knows none of the systems it shows."""
