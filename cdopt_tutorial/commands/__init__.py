"""The subcommands, a file each: ``add(parser)`` adds the flags, ``run(args)`` runs."""
