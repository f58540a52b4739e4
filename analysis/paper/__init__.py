"""The FCDP paper's tables and figures again: contents, fit, tables, figures, and the chapter."""
