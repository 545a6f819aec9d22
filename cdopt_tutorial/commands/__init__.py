"""The subcommands, a file each: of the systems as ``training`` says, and of the book.

The book's have ``add(parser)``, which adds their flags, and ``run(args)``.
"""
