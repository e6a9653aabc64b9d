"""Autoencoders of video and images for ComfyUI, by the library video-vae. ComfyUI imports this from custom_nodes."""

from . import _package  # noqa: F401  (makes `import video_vae` work, so it comes first)
from .nodes import VideoVaeDecode, VideoVaeEncode, VideoVaeForSeedVR2, VideoVaeLoad, VideoVaeLoader

NODE_CLASS_MAPPINGS = {
    "VideoVaeLoad": VideoVaeLoad,
    "VideoVaeLoader": VideoVaeLoader,
    "VideoVaeEncode": VideoVaeEncode,
    "VideoVaeDecode": VideoVaeDecode,
    "VideoVaeForSeedVR2": VideoVaeForSeedVR2,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "VideoVaeLoad": "Load VAE (video-vae)",
    "VideoVaeLoader": "Load Video VAE (video-vae)",
    "VideoVaeEncode": "Video VAE Encode (video-vae)",
    "VideoVaeDecode": "Video VAE Decode (video-vae)",
    "VideoVaeForSeedVR2": "Video VAE for SeedVR2 (video-vae)",
}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
