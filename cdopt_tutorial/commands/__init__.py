"""The subcommands, a file each: ``add(parser)`` adds flags, ``run(args)`` runs it."""
