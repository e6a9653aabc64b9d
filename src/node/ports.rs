//! The table of nodes and their ports.

use std::ffi::CStr;

use super::{PARAMS, Param};
use crate::ir::TensorKind;
use crate::model::Direction;

#[derive(Debug)]
pub struct Port {
    pub name: &'static CStr,
    pub output: bool,
    /// May be left out.
    pub optional: bool,
    /// Ports of the same kind can be connected.
    pub kind: TensorKind,
    pub help: &'static CStr,
}

#[derive(Debug)]
pub struct Node {
    pub id: &'static CStr,
    pub label: &'static CStr,
    pub help: &'static CStr,
    pub direction: Direction,
    pub ports: &'static [Port],
}

impl Node {
    pub fn id(&self) -> &'static str {
        utf8(self.id)
    }

    /// The parameters of this node, in the order of the table.
    pub fn params(&self) -> impl Iterator<Item = &'static Param> {
        let direction = self.direction;
        PARAMS.iter().filter(move |p| p.applies_to(direction))
    }
}

pub static NODES: &[Node] = &[
    Node {
        id: c"encode",
        label: c"Video to latents",
        help: c"Turns video into latents. The first frame becomes one latent frame, and so does every time_scale frames after it; height and width shrink by spatial_scale. vvae_model_info has both.",
        direction: Direction::Encode,
        ports: &[
            Port {
                name: c"video",
                output: false,
                optional: false,
                kind: TensorKind::Video,
                help: c"The clip, [B, C, T, H, W] in any memory layout. Lengths that do not fill a latent frame are padded with the last frame, sizes that do not fill a latent pixel with the edge.",
            },
            Port {
                name: c"latent",
                output: true,
                optional: false,
                kind: TensorKind::Latent,
                help: c"Mean of the distribution or a sample of it, times scaling_factor, or as latents=model has it.",
            },
            Port {
                name: c"logvar",
                output: true,
                optional: true,
                kind: TensorKind::Latent,
                help: c"Logarithm of the distribution's variance, in the shape of latent.",
            },
        ],
    },
    Node {
        id: c"decode",
        label: c"Latents to video",
        help: c"Turns latents into video. The first latent frame becomes one frame, every other time_scale frames.",
        direction: Direction::Decode,
        ports: &[
            Port {
                name: c"latent",
                output: false,
                optional: false,
                kind: TensorKind::Latent,
                help: c"Latents of encode, [B, C, T, H, W], times scaling_factor, or as latents=model has them.",
            },
            Port {
                name: c"video",
                output: true,
                optional: false,
                kind: TensorKind::Video,
                help: c"The clip. If it is shorter or smaller than the latents imply, the rest is cropped.",
            },
        ],
    },
];

/// A text of the table. `tests/abi_discovery.rs` reads all of them.
pub(super) fn utf8(text: &'static CStr) -> &'static str {
    text.to_str().expect("a text in the node table that is not UTF-8")
}
