"""Recomputation of the papers' tables and figures for any models: ``draftwise study``."""
