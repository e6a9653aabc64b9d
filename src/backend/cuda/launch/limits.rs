//! What no kernel does. A checkpoint that asks for it is refused when it is opened, not in the middle of a run.

use crate::backend::cuda::launch::tiling::{self as geometry, Kind};
use crate::backend::{ConvLayout, Precision, Prologue};
use crate::error::{Error, Result};

/// Channels of a query that fit into the registers of a warp, of which two share one.
const MOST_ATTENTION_CHANNELS: u64 = 512;
/// A block of the norm has a thread for every 16 bytes of a pixel, and at most 256 threads.
const MOST_NORM_BYTES: u64 = 256 * 16;

pub fn check(precision: Precision, layouts: &[ConvLayout], attention: &[u64]) -> Result<()> {
    layouts.iter().try_for_each(|layout| convolution(precision, layout))?;
    attention.iter().try_for_each(|channels| self::attention(*channels))
}

fn convolution(precision: Precision, layout: &ConvLayout) -> Result<()> {
    Kind::of(layout)?;
    let most = MOST_NORM_BYTES / precision.bytes();
    if layout.prologue != Prologue::None && geometry::stride(layout.cin) > most {
        return refuse(format!("a norm of {} channels in {} (at most {most})", layout.cin, precision.name()));
    }
    Ok(())
}

pub fn attention(channels: u64) -> Result<()> {
    if channels.is_multiple_of(8) && channels <= MOST_ATTENTION_CHANNELS {
        return Ok(());
    }
    refuse(format!("attention over {channels} channels (a multiple of 8 up to {MOST_ATTENTION_CHANNELS})"))
}

/// `what` no kernel does, with what one would do behind it.
pub fn refuse<T>(what: String) -> Result<T> {
    Err(Error::Device(format!("no kernel on the GPU does {what}; use device \"cpu\" for this checkpoint")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Config, Direction, Network};

    fn error_in(precision: Precision, channels: &[u64], latent: u64) -> Option<String> {
        let config = Config { channels: channels.to_vec(), layers: 1, groups: 1, latent, temporal_levels: 0 };
        let answer = [Direction::Encode, Direction::Decode].into_iter().try_for_each(|direction| {
            let network = Network::new(&config, direction);
            let layouts: Vec<ConvLayout> = network.layers.iter().map(|layer| layer.layout).collect();
            check(precision, &layouts, &network.attention_channels())
        });
        answer.err().map(|why| why.to_string())
    }

    fn error(channels: &[u64], latent: u64) -> Option<String> {
        error_in(Precision::Fp16, channels, latent)
    }

    #[test]
    fn published_and_test_models_are_supported() {
        for precision in Precision::ALL {
            assert_eq!(error_in(precision, &[128, 256, 512, 512], 16), None);
        }
        assert!(error_in(Precision::Fp32, &[128, 2048, 8], 1).is_some_and(|why| why.contains("2048 channels in fp32")));
        assert_eq!(error(&[16, 32, 32, 32], 16), None);
        assert_eq!(error(&[12, 20, 24], 3), None, "few channels in");
        assert_eq!(error(&[128, 2048, 8], 1), None, "few channels out");
    }

    #[test]
    fn what_has_no_kernel_is_refused_with_a_way_out() {
        for (channels, latent, says) in [
            (&[32, 36][..], 16, "attention over 36 channels"),
            (&[32, 520], 16, "attention over 520 channels"),
            (&[128, 2056, 64], 16, "a norm of 2056 channels"),
            (&[136, 64], 16, "a convolution from 136 to 3 channels"),
            (&[64, 256], 1, "a convolution from 256 to 2 channels"),
            (&[3, 8], 16, "a convolution from 3 to 3 channels"),
            (&[8, 2, 8], 16, "a convolution from 2 to 2 channels"),
        ] {
            let why = error(channels, latent).unwrap_or_else(|| panic!("{channels:?} is taken"));
            assert!(why.contains(says) && why.contains("\"cpu\""), "{why}");
        }
    }
}
