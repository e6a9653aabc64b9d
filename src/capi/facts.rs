//! What a checkpoint says of its model, in the form of the ABI. Read once, so that a host may keep pointers to it.

use std::collections::BTreeMap;
use std::ptr::null;

use super::text;
use super::types::vvae_model_desc;
use crate::error::Result;
use crate::model::families::{LatentFacts, LatentValues};
use crate::model::{Checkpoint, Direction, Model, Network};

#[derive(Default)]
pub(super) struct ModelFacts {
    /// Of video that is decoded.
    channels: u64,
    /// By the values of `latent_format` that fit; `None`: auto.
    latents: BTreeMap<Option<&'static str>, LatentFacts>,
}

impl ModelFacts {
    pub fn of(checkpoint: &Checkpoint) -> Result<ModelFacts> {
        let channels = Network::new(checkpoint.model(), Direction::Decode)?.video_channels();
        Ok(ModelFacts { channels, latents: LatentFacts::of_formats(checkpoint)? })
    }

    /// `latent_format`: the setting. The pointers are valid as long as `self`.
    pub fn describe(&self, model: &Model, latent_format: Option<&str>) -> vvae_model_desc {
        let geometry = model.geometry;
        let formats: Vec<&str> = model.latents.iter().map(|format| format.name).collect();
        let mut desc = vvae_model_desc {
            struct_size: 0,
            pixel_channels: geometry.pixel_channels as u32,
            latent_channels: geometry.latent_channels as u32,
            spatial_scale: geometry.space as u32,
            time_scale: geometry.time as u32,
            decoded_channels: self.channels as u32,
            packing: 1,
            packed_channels: geometry.latent_channels as u32,
            latents_known: 0,
            statistics_count: 0,
            family: text::array(model.family.name),
            latent_format: text::array(""),
            latent_formats: text::array(&formats.join(",")),
            latent_scale: 1.0,
            latent_shift: 0.0,
            latent_means: null(),
            latent_deviations: null(),
        };
        if let Some(latents) = self.latents.get(&latent_format) {
            add_latents(&mut desc, latents);
        }
        desc
    }
}

fn add_latents(desc: &mut vvae_model_desc, latents: &LatentFacts) {
    desc.latents_known = 1;
    desc.latent_format = text::array(latents.name);
    desc.packing = latents.packing as u32;
    desc.packed_channels *= (latents.packing * latents.packing) as u32;
    match &latents.values {
        LatentValues::Scaled { scale, shift } => (desc.latent_scale, desc.latent_shift) = (*scale, *shift),
        LatentValues::Standardised { means, deviations } => {
            desc.statistics_count = means.len() as u32;
            (desc.latent_means, desc.latent_deviations) = (means.as_ptr(), deviations.as_ptr());
        }
    }
}
