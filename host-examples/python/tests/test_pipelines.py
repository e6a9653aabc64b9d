"""Diffusers' own pipelines with `pipe.vae` replaced: tiny random transformers, f32, on the CPU, two steps."""

import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from tiny_checkpoints import both, randomise  # noqa: E402


def text(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(8))


def picture(height, width):
    from PIL import Image

    return Image.fromarray(np.random.default_rng(7).integers(0, 256, (height, width, 3), "u1"))


def sdxl(vae):
    # The widths of the time ids, 6 x 8, and of the pooled text make the projection's input.
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=1,
        projection_class_embeddings_input_dim=48 + 32,
        cross_attention_dim=64,
        norm_num_groups=1,
    )
    scheduler = diffusers.EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    prompt = {"prompt_embeds": text(1, 5, 64), "pooled_prompt_embeds": text(1, 32)}
    return {"unet": unet, "scheduler": scheduler, "vae": vae}, {**prompt, "guidance_scale": 1.0}


def flow():
    return diffusers.FlowMatchEulerDiscreteScheduler()


def flux(vae):
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    transformer = diffusers.FluxTransformer2DModel(
        **sizes, in_channels=64, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8]
    )
    prompt = {"prompt_embeds": text(1, 5, 32), "pooled_prompt_embeds": text(1, 32)}
    return {"transformer": transformer, "scheduler": flow(), "vae": vae}, prompt


def flux2(vae):
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    transformer = diffusers.Flux2Transformer2DModel(
        **sizes,
        patch_size=1,
        in_channels=4 * vae.config.latent_channels,
        joint_attention_dim=16,
        timestep_guidance_channels=32,
        axes_dims_rope=[4, 4, 4, 4],
    )
    return {"transformer": transformer, "scheduler": flow(), "vae": vae}, {"prompt_embeds": text(1, 5, 16)}


def wan(vae):
    transformer = diffusers.WanTransformer3DModel(
        in_channels=vae.config.z_dim,
        out_channels=vae.config.z_dim,
        num_attention_heads=2,
        attention_head_dim=12,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=1,
        rope_max_seq_len=32,
    )
    parts = {"transformer": transformer, "scheduler": flow(), "vae": vae}
    return parts, {"prompt_embeds": text(1, 5, 32), "guidance_scale": 1.0, "num_frames": 9}


def wan22(vae):
    parts, prompt = wan(vae)
    return {**parts, "expand_timesteps": True}, {**prompt, "height": 64, "width": 96}


class Tokens:
    """In place of a tokenizer: the embeddings are given, and the pipeline asks for two numbers."""

    @property
    def tokenizer(self):
        return self

    def encode(self, text):
        return [0]

    def apply_chat_template(self, messages, **options):
        return [[0]]


def qwen_image_21(vae):
    sizes = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    transformer = diffusers.QwenImage21Transformer2DModel(**sizes, context_in_dim=16, axes_dims_rope=(4, 6, 6))
    parts = {"transformer": transformer, "scheduler": flow(), "vae": vae, "processor": Tokens()}
    return parts, {"prompt_embeds": text(1, 5, 16), "height": 64, "width": 96}


def qwen_image(vae):
    sizes = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    transformer = diffusers.QwenImageTransformer2DModel(**sizes, joint_attention_dim=16, axes_dims_rope=(4, 6, 6))
    prompt = {"prompt_embeds": text(1, 5, 16), "prompt_embeds_mask": torch.ones(1, 5, dtype=torch.long)}
    return {"transformer": transformer, "scheduler": flow(), "vae": vae}, prompt


def made(name, parts):
    """A pipeline that has no text encoders, as the embeddings are given."""
    pipeline = getattr(diffusers, name)
    wanted = inspect.signature(pipeline).parameters
    others = {key: None for key, value in wanted.items() if value.default is inspect.Parameter.empty}
    pipe = pipeline(**{**others, **parts})
    pipe.set_progress_bar_config(disable=True)
    return pipe


# Of each pipeline: the checkpoint, the parts, what the call gets.
PIPELINES = {
    "StableDiffusionXLPipeline": ("sdxl", sdxl, {}),
    "StableDiffusionXLImg2ImgPipeline": ("sdxl", sdxl, {"image": (32, 48), "strength": 0.7, "num_inference_steps": 3}),
    "FluxPipeline": ("flux", flux, {}),
    "FluxImg2ImgPipeline": ("flux", flux, {"image": (32, 48), "strength": 0.7, "num_inference_steps": 3}),
    "WanPipeline": ("wan21", wan, {}),
    "WanPipeline of 2.2": ("wan22", wan22, {}),
    "QwenImage21Pipeline": ("qwen_image_21", qwen_image_21, {}),
    "QwenImagePipeline": ("qwen_image", qwen_image, {}),
    "QwenImageImg2ImgPipeline": (
        "qwen_image",
        qwen_image,
        {"image": (32, 48), "strength": 0.7, "num_inference_steps": 3},
    ),
    "Flux2Pipeline": ("flux2", flux2, {}),
    "Flux2Pipeline with an image": ("flux2", flux2, {"image": (64, 64)}),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_the_picture_is_that_of_the_pipeline(name, tmp_path):
    checkpoint, parts_of, options = PIPELINES[name]
    theirs, module = both(checkpoint, tmp_path)
    parts, prompt = parts_of(theirs)
    randomise(parts.get("transformer") or parts["unet"])
    call = {"height": 32, "width": 48, "num_inference_steps": 2, **prompt, **options}
    if "image" in call:
        call["image"] = picture(*call["image"])
    if "Img2Img" in name:
        for side in ("height", "width"):
            call.pop(side)
    pipe = made(name.split()[0], parts)
    pictures = []
    for vae in (theirs, module):
        pipe.vae = vae
        out = pipe(**call, output_type="np", generator=torch.Generator().manual_seed(3))
        pictures.append(np.asarray(out[0]))
    assert pictures[0].shape == pictures[1].shape and pictures[0].std() > 0.01
    assert np.abs(pictures[0] - pictures[1]).max() <= 1e-4


def test_a_pipeline_is_made_with_it(tmp_path):
    """Given to the constructor, and upcast by SDXL's pipeline as its own VAE is."""
    _, module = both("sdxl", tmp_path)
    parts, prompt = sdxl(module.to(torch.float16))
    randomise(parts["unet"])
    pipe = made("StableDiffusionXLPipeline", parts)
    assert pipe.vae is module and pipe.vae_scale_factor == 8
    out = pipe(**prompt, height=16, width=16, num_inference_steps=1, output_type="np")
    assert np.isfinite(out.images).all() and module.dtype == torch.float16
