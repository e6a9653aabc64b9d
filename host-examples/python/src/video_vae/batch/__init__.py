"""Collections of clips: a folder of videos and images becomes shards of latents, on one machine or on a Ray cluster.

    python -m video_vae.batch encode CLIPS --weights ema_vae_fp16.safetensors --out LATENTS

docs/scale.md has the rest.
"""
