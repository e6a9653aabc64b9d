//! The network as far as files and arithmetic are concerned: which sizes there are, and what they cost. Asks the
//! library's own model, so that names, shapes and layers are written down once.

use std::path::Path;
use std::sync::Arc;

use video_vae::internals::ir::{FrameShape, Shape, Window};
use video_vae::internals::model::checkpoint::Checkpoint;
use video_vae::internals::model::families::seedvr2::Sizes;
use video_vae::internals::model::{Direction, Layer, Model, Network};

use crate::Result;

/// The name of a fingerprint in a latent file's metadata.
pub const FINGERPRINT: &str = "checkpoint";

/// The library's own checksum of a checkpoint's contents: the same on every machine and for every file name.
pub fn fingerprint(path: &Path) -> Result<String> {
    let found = Checkpoint::open(path).map(|checkpoint| checkpoint.identity().checksum);
    found.map(|sum| format!("{sum:016x}")).map_err(|why| why.to_string())
}

/// The model of a checkpoint. The whole file is checked.
pub fn model(path: &Path) -> Result<Arc<Model>> {
    Checkpoint::open(path).map(|checkpoint| Arc::clone(checkpoint.model())).map_err(|why| why.to_string())
}

/// Checks what a checkpoint to be made must fulfil.
pub fn check(config: &Sizes) -> Result<()> {
    let levels = config.channels.len() as u64;
    if !(1..=8).contains(&levels) || config.channels.iter().any(|c| !(1..=1 << 14).contains(c)) {
        return Err("--channels: give 1 to 8 numbers from 1 to 16384, such as 128,256,512,512".into());
    }
    if config.groups == 0 || config.channels.iter().any(|c| !c.is_multiple_of(config.groups)) {
        let groups = config.groups;
        return Err(format!("--groups: every number of channels must be a multiple of it, and {groups} is not such"));
    }
    if config.temporal_levels >= levels {
        return Err(format!("--temporal: {levels} levels have {} changes of resolution at most", levels - 1));
    }
    let ranges = [("layers", config.layers, 16), ("latent", config.latent, 4096)];
    match ranges.into_iter().find(|(_, value, most)| !(1..=*most).contains(value)) {
        Some((name, value, most)) => Err(format!("--{name}: {value} is not from 1 to {most}")),
        None => Ok(()),
    }
}

/// Pixels of a layer's input and output, and frames alike.
struct Extent {
    pixels: [f64; 2],
    frames: [u64; 2],
}

/// Multiplications and additions of one direction on a video of this size, on the network as published: nothing
/// folded, first frames like any other.
pub fn flops(model: &Model, encoder: bool, size: [u64; 3]) -> Result<f64> {
    count(model, encoder, size, |layer, extent| {
        let products = layer.weights().enumerate().map(|(part, weights)| {
            // The 1x1x1 convolution of an upsampler runs before its frames are unfolded.
            let at = usize::from(layer.layout.window != Window::Up || part > 0);
            weights.shape.iter().product::<u64>() as f64 * extent.frames[at] as f64 * extent.pixels[at]
        });
        2.0 * products.sum::<f64>()
    })
}

/// Those that are left once what can be multiplied out beforehand is: taps over a first frame that is repeated are
/// one tap, and an upsampler is one convolution of 2 x 2 taps.
pub fn folded_flops(model: &Model, encoder: bool, size: [u64; 3]) -> Result<f64> {
    count(model, encoder, size, |layer, extent| {
        let (layout, frames) = (&layer.layout, extent.frames[1]);
        let terms: usize = (0..frames).map(|frame| layer.time.recipe(frame).terms().len()).sum();
        let taps = layout.window.side().pow(2) * layout.cin * terms as u64 + layout.shortcut.unwrap_or(0) * frames;
        2.0 * (taps * layout.cout) as f64 * extent.pixels[1]
    })
}

/// `of_layer` for every layer of one direction, and the products of attention.
fn count(model: &Model, encoder: bool, size: [u64; 3], of_layer: impl Fn(&Layer, &Extent) -> f64) -> Result<f64> {
    let [frames, height, width] = size;
    let network = Network::new(model, if encoder { Direction::Encode } else { Direction::Decode });
    let (network, geometry) = (network.map_err(|why| why.to_string())?, model.geometry);
    let (input, frames) = match network.direction {
        Direction::Encode => {
            (network.input_frame(Shape::new(1, geometry.pixel_channels, frames, height, width)), frames)
        }
        Direction::Decode => {
            let [rows, columns] = [height, width].map(|length| length.div_ceil(geometry.space));
            (FrameShape::new(rows, columns, geometry.latent_channels), geometry.latent_frames(frames))
        }
    };
    let shapes = network.input_shapes(input);
    let of = |layer: usize, frames: [u64; 2]| {
        let window = network.layers[layer].layout.window;
        let pixels = [shapes[layer], window.output(shapes[layer], 1)].map(|shape| shape.pixels() as f64);
        of_layer(&network.layers[layer], &Extent { pixels, frames })
    };
    let (mut before, mut total) = (network.padded_frames(frames), 0.0);
    for (stage, made) in network.stages.iter().zip(network.stage_frames(frames)) {
        total += of(stage.head(), [before, made]) + stage.body().map(|layer| of(layer, [made; 2])).sum::<f64>();
        for layer in stage.body().filter(|layer| network.layers[*layer].attends) {
            // Every pixel with every pixel, twice.
            let (pixels, channels) = (shapes[layer].pixels() as f64, shapes[layer].channels as f64);
            total += 4.0 * made as f64 * pixels * pixels * channels;
        }
        before = made;
    }
    Ok(total)
}
