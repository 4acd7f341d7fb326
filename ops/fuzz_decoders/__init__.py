"""Coverage-guided fuzzing of everything that decodes bytes from outside of its process."""
