"""Writing and reading files of tensors."""
