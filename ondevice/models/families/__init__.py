"""One file a family, named for the Hugging Face `model_type`, and what several of them share."""
