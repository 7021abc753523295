"""The demo model: SmolLM2-135M with its MLPs split into experts. Downloads the source and builds the checkpoint, an
ordinary Qwen2-MoE folder: no other package has code for it.
"""
