"""What keeps a run from losing anything: signals."""
