"""What public bug reports found, a file per kind, named after what a person sees."""
