"""What ``cdopt-tutorial bench`` runs: speed, and learning rates, measured here."""
