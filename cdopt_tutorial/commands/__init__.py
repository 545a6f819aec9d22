"""The subcommands of ``cdopt-tutorial``, a file each.

A file's ``add(commands)`` adds the parser and says what runs it. Modules that take
long to import are imported where they are used, so that ``--help`` is quick.
"""
