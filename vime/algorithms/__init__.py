"""Formulas of the learning algorithms; nothing here knows processes, files or engines."""
