"""The subcommands, a file each; ``add(parser)`` adds the flags and what runs it."""
