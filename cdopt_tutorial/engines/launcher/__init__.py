"""The processes of a run on this host: pack roles, start, watch and end workers."""
