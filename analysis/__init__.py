"""Records in; tables, figures and one self-contained report out."""
