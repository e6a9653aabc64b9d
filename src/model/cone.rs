//! The cone of a range: of each layer, the frames that a range of the network's output depends on.
//! Asks every layer's recipes, from the output back to the input. Must not know schedules.

use std::ops::Range;

use super::network::{Network, Source, attention_work};
use crate::ir::{FrameShape, LayerId};

/// Output frames of a clip: latent frames for encode, video frames for decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameRange {
    pub first: u64,
    /// `None`: to the end of the clip.
    pub end: Option<u64>,
}

impl FrameRange {
    pub const WHOLE: FrameRange = FrameRange { first: 0, end: None };
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cone {
    pub range: FrameRange,
    /// Of each layer, the first output frame. A layer's input begins where the layers before it begin.
    firsts: Vec<u64>,
    /// The first input frame of the network, and where the input ends that the first output frame needs.
    pub first_input: u64,
    pub fill_end: u64,
    /// Where the input of the range ends, if the range has an end.
    input_end: Option<u64>,
    /// Of each stage, frames at the end that its input suffices for, but that the range does not depend on.
    trims: Vec<u64>,
}

impl Cone {
    pub fn new(network: &Network, range: FrameRange) -> Cone {
        let (firsts, first_input) = first_frames(network, range.first);
        let stage_ends = range.end.map(|end| ends_before(network, end));
        let trims = stage_ends.as_ref().map_or_else(
            || vec![0; network.stages.len()],
            |(ends, input)| network.stage_frames(*input).iter().zip(ends).map(|(made, end)| made - end).collect(),
        );
        let fill_end = ends_before(network, range.first + 1).1;
        Cone { range, firsts, first_input, fill_end, input_end: stage_ends.map(|(_, input)| input), trims }
    }

    /// Input frames of the range within a clip of `frames` input frames.
    pub fn inputs(&self, frames: u64) -> Range<u64> {
        self.first_input..self.input_end.map_or(frames, |end| end.min(frames))
    }

    /// The first output frame of a layer.
    pub fn first(&self, layer: LayerId) -> u64 {
        self.firsts[layer]
    }

    /// Those of `frames` that a layer computes.
    pub fn outputs(&self, layer: LayerId, frames: &Range<u64>) -> Range<u64> {
        let first = self.firsts[layer];
        frames.start.max(first)..frames.end.max(first)
    }

    /// Where the frames of each stage end, for input up to `end`.
    pub fn stage_ends(&self, network: &Network, end: u64) -> Vec<u64> {
        network.stage_frames(end).iter().zip(&self.trims).map(|(made, trim)| made.saturating_sub(*trim)).collect()
    }

    /// Output frames for input up to `end`.
    pub fn output_frames(&self, network: &Network, end: u64) -> u64 {
        let last = self.stage_ends(network, end).last().copied();
        last.unwrap_or(0).saturating_sub(self.range.first)
    }

    /// The multiplications for one clip of these frames with input up to `end`. 128 bits: long clips pass 2^64.
    pub fn work(&self, network: &Network, input: FrameShape, end: u64) -> u128 {
        let shapes = network.input_shapes(input);
        let mut total = 0;
        for (stage, end) in network.stages.iter().zip(self.stage_ends(network, end)) {
            let of = |layer: LayerId| {
                let own = &network.layers[layer];
                let attends = if own.attends { attention_work(shapes[layer]) } else { 0 };
                let work = u128::from(own.steady_work(shapes[layer])) + u128::from(attends);
                u128::from(own.time.computed(&(self.first(layer)..end))) * work
            };
            total += stage.layers.clone().map(of).sum::<u128>();
        }
        total
    }

    /// Whether the last frames of some stage are not computed.
    pub fn is_trimmed(&self) -> bool {
        self.trims.iter().any(|trim| *trim > 0)
    }
}

/// Latent frames after which recipes repeat: frames are computed in pairs.
const PERIOD_LATENTS: u64 = 2;
/// Layers that begin with this frame or a later one read none of those that begin a clip, which have other recipes.
const STEADY: u64 = 16;

impl Cone {
    /// Output frames after which the recipes of every layer repeat.
    pub fn period(network: &Network) -> u64 {
        PERIOD_LATENTS * network.geometry.time / network.latent_rate()
    }

    /// Whether the range is another one, whole periods later or earlier. Such ranges take the same work and memory.
    pub fn is_shift_of(&self, other: &Cone, network: &Network) -> bool {
        if self == other {
            return true;
        }
        let frames = |cone: &Cone| cone.range.end.map(|end| end - cone.range.first);
        let inputs = |cone: &Cone| cone.input_end.map(|end| end - cone.first_input);
        let is_steady = |cone: &Cone| cone.first_input >= STEADY && cone.firsts.iter().all(|first| *first >= STEADY);
        self.range.first.abs_diff(other.range.first).is_multiple_of(Cone::period(network))
            && is_steady(self)
            && is_steady(other)
            && (frames(self), inputs(self), &self.trims) == (frames(other), inputs(other), &other.trims)
    }
}

/// The first output frame of each layer that outputs from `first` on depend on, and the first input frame.
fn first_frames(network: &Network, first: u64) -> (Vec<u64>, u64) {
    let mut firsts = vec![u64::MAX; network.layers.len()];
    let mut first_input = u64::MAX;
    if let Some(last) = firsts.last_mut() {
        *last = first;
    }
    for (id, layer) in network.layers.iter().enumerate().rev() {
        let first = firsts[id];
        // What is added is added frame by frame.
        let around = layer.level.map(|level| (Source::Layer(level.from), level.oldest(first)));
        let added = layer.addend.map(|source| (source, first)).into_iter().chain(around);
        for (source, first) in added.chain([(layer.input, layer.time.oldest(first))]) {
            let known = match source {
                Source::Input => &mut first_input,
                Source::Layer(from) => &mut firsts[from],
            };
            *known = first.min(*known);
        }
    }
    (firsts, first_input)
}

/// Where the frames of each stage end that outputs before `end` depend on, and where the input does.
fn ends_before(network: &Network, mut end: u64) -> (Vec<u64>, u64) {
    let newest = |layer: LayerId, end: u64| network.layers[layer].time.input_end(end - 1);
    let mut ends = vec![0; network.stages.len()];
    for (stage, stage_end) in network.stages.iter().zip(&mut ends).rev() {
        // The layers of a body read no frame after their own.
        debug_assert!(stage.body().all(|layer| newest(layer, end) == end));
        *stage_end = end;
        end = newest(stage.head(), end);
    }
    (ends, end)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::model::Direction;
    use crate::model::LevelMap;
    use crate::model::families::seedvr2::Sizes;
    use crate::model::families::{wan, wan22};

    fn networks() -> Vec<Network> {
        let sizes = |levels, layers, temporal_levels| Sizes {
            channels: vec![8; levels],
            layers,
            groups: 8,
            latent: 4,
            temporal_levels,
        };
        let sizes = [sizes(4, 2, 2), sizes(3, 1, 2), sizes(4, 1, 1), sizes(2, 3, 0)];
        let both = |sizes: &Sizes| Direction::ALL.map(|direction| Network::new(&sizes.model(), direction).unwrap());
        let mut networks: Vec<Network> = sizes.iter().flat_map(both).collect();
        let resampled = wan::Sizes {
            pixel_channels: [4, 4],
            latent_channels: 4,
            time_kernel: 3,
            encoder: vec![wan::level(8, Some((8, false))), wan::level(16, Some((16, true))), wan::level(16, None)],
            decoder: vec![wan::level(16, Some((16, true))), wan::level(8, Some((8, false))), wan::level(8, None)],
        };
        let around = |direction| Network::new(&wan22::model(&resampled), direction).unwrap();
        networks.extend(Direction::ALL.map(around));
        networks
    }

    /// The input frames of a layer that its outputs `frames` read.
    fn read_by(network: &Network, layer: LayerId, frames: &BTreeSet<u64>) -> BTreeSet<u64> {
        let recipe = |frame: &u64| network.layers[layer].time.recipe(*frame);
        frames.iter().flat_map(|f| recipe(f).terms().iter().map(|term| term.input).collect::<Vec<_>>()).collect()
    }

    /// The definition: frame by frame, which outputs of each layer a range depends on, and which inputs.
    fn dependencies(network: &Network, range: Range<u64>) -> (Vec<BTreeSet<u64>>, BTreeSet<u64>) {
        let mut outputs = vec![BTreeSet::new(); network.layers.len()];
        let mut inputs = BTreeSet::new();
        *outputs.last_mut().unwrap() = range.collect();
        for (id, layer) in network.layers.iter().enumerate().rev() {
            let of_layer = outputs[id].clone();
            let read = read_by(network, id, &of_layer);
            if let Some(level) = layer.level {
                let sources = |frame: &u64| match level.map {
                    LevelMap::Mean => level.oldest(*frame)..level.parts * frame + 1,
                    LevelMap::Repeat { .. } => level.smaller(*frame)..level.smaller(*frame) + 1,
                };
                outputs[level.from].extend(of_layer.iter().flat_map(sources));
            }
            for (source, frames) in [(Some(layer.input), read), (layer.addend, of_layer)] {
                match source {
                    Some(Source::Input) => inputs.extend(frames),
                    Some(Source::Layer(from)) => outputs[from].extend(frames),
                    None => {}
                }
            }
        }
        (outputs, inputs)
    }

    #[test]
    fn the_cone_is_what_the_recipes_need_and_no_more() {
        for network in networks() {
            for (first, count) in [(0, 1), (0, 7), (1, 1), (2, 5), (5, 3), (17, 1), (60, 4), (61, 2), (62, 9), (99, 30)]
            {
                let cone = Cone::new(&network, FrameRange { first, end: Some(first + count) });
                let (outputs, inputs) = dependencies(&network, first..first + count);
                let span = |frames: &BTreeSet<u64>| *frames.first().unwrap()..*frames.last().unwrap() + 1;
                assert_eq!(cone.inputs(u64::MAX), span(&inputs));
                let ends = cone.stage_ends(&network, cone.inputs(u64::MAX).end);
                for (stage, end) in network.stages.iter().zip(ends) {
                    for layer in stage.layers.clone() {
                        assert_eq!(cone.first(layer)..end, span(&outputs[layer]), "layer {layer}, {first} + {count}");
                        assert_eq!(outputs[layer].len() as u64, end - cone.first(layer));
                    }
                }
                let fill = dependencies(&network, first..first + 1).1;
                assert_eq!(cone.fill_end, *fill.last().unwrap() + 1);
                assert_eq!(cone.output_frames(&network, cone.inputs(u64::MAX).end), count);
            }
        }
    }

    #[test]
    fn a_whole_clip_begins_with_every_layers_first_frame() {
        for network in networks() {
            let cone = Cone::new(&network, FrameRange::WHOLE);
            assert!((0..network.layers.len()).all(|layer| cone.first(layer) == 0));
            assert_eq!((cone.inputs(9), cone.fill_end, cone.is_trimmed()), (0..9, 1, false));
            assert_eq!(cone.stage_ends(&network, 9), network.stage_frames(9));
        }
    }
}
