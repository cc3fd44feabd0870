"""What rows become: formats, prompt templates, conversations and their label masks, scores."""
