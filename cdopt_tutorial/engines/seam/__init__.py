"""How the parts of a system call each other, whatever carries the calls."""
