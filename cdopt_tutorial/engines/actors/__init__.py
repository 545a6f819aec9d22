"""Workers that are actors: what they do, who starts them, and how Ray does it."""
