"""Processes of ``torch.distributed`` that load one file together."""
