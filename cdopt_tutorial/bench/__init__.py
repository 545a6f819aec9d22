"""What ``cdopt-tutorial bench`` runs: speed, measured here."""
