"""The papers' tables and figures, recomputed for any models: ``draftwise study``."""
