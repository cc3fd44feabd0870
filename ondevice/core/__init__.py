"""Definitions that every other room uses: errors, settings, sessions, methods and programs."""
