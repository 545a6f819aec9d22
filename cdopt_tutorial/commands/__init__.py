"""The subcommands of ``cdopt-tutorial``, a file each.

``add(parser)`` adds a command's flags and sets what runs it. Only the module of the
command that is asked for is imported.
"""
