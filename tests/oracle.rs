//! The graphs of all families, interpreted in f64, give what the authors' implementations give.

mod common;

use common::golden;
use common::oracle::{Clip, evaluate};
use common::safetensors::{Folder, Tensor, Tensors, read, to_bytes};
use std::collections::{BTreeMap, BTreeSet};
use video_vae::internals::model::checkpoint::Checkpoint;
use video_vae::internals::model::families::{LatentFormat, LatentScaling as Latent};
use video_vae::internals::model::graph::{Conv, FirstFrame, Graph, GraphBuilder, SpaceAxis, TimeAxis};

/// A checkpoint and its cases, below tests/golden.
struct Golden {
    checkpoint: &'static str,
    cases: &'static [&'static str],
    /// The format of its latents: `None` where the tensors say it.
    format: Option<&'static str>,
    /// Of a result, relative to the root mean square of what is expected.
    most_error: f64,
    /// Whether its videos were clamped to [-1, 1] after the network, as diffusers does.
    clamped: bool,
}

/// Both graphs of a checkpoint, and its latents.
struct Model {
    encoder: Graph,
    decoder: Graph,
    latent: Latent,
}

impl Golden {
    /// The tensors under the names that the graphs have for them.
    fn open(&self) -> (Tensors, Model) {
        let path = golden(&format!("{}.safetensors", self.checkpoint));
        let tensors = read(&path);
        let open = Checkpoint::open(&path).unwrap();
        let model = open.model();
        let is_format = |latents: &&LatentFormat| self.format.is_none_or(|name| name == latents.name);
        let latent = model.latents.iter().find(is_format).unwrap().scaling;
        let names: Vec<&str> = tensors.keys().map(String::as_str).collect();
        let named = (model.family.canonical)(&names).into_iter().map(String::from).zip(tensors.values().cloned());
        let tensors = named.filter(|(name, _)| !(model.family.is_unread)(name)).collect();
        (tensors, Model { encoder: model.encoder.clone(), decoder: model.decoder.clone(), latent })
    }

    /// Every tensor of a case is an input or is compared.
    fn check(&self, case: &str, model: &Model, weights: &Tensors) {
        let what = format!("{}-{case}", self.checkpoint);
        let case = read(&golden(&format!("{what}.safetensors")));
        let run = |graph, input: &str| -> Vec<Clip> {
            clips(&case[input]).into_iter().map(|clip| evaluate(graph, weights, clip)).collect()
        };
        let encoded = run(&model.encoder, "encode_video");
        let decoded = run(&model.decoder, "decode_latent");
        let mean = || encoded.iter().map(|both| halves(both)[0].clone());
        for (output, expected) in &case {
            let found: Vec<Clip> = match output.as_str() {
                "encode_video" | "decode_latent" => continue,
                "encode_mean" => mean().collect(),
                "encode_logvar" => encoded.iter().map(|both| halves(both)[1].clone()).collect(),
                "encode_model_latent" => mean().map(|z| model_latent(model.latent, weights, &z)).collect(),
                "decode_video" if self.clamped => decoded.iter().map(|clip| clip.clone().map(clamped)).collect(),
                "decode_video" => decoded.clone(),
                _ => panic!("{what} has an unknown tensor, {output}"),
            };
            let (error, most) = (relative_error(&found, &clips(expected)), self.most_error);
            println!("{what} {output}: {error:.2e}");
            assert!(error <= most, "{what} {output}: relative error {error:.2e}, expected at most {most:.0e}");
        }
    }
}

fn clamped(value: f64) -> f64 {
    value.clamp(-1.0, 1.0)
}

const fn known(checkpoint: &'static str, cases: &'static [&'static str], format: Option<&'static str>) -> Golden {
    Golden { checkpoint, cases, format, most_error: 1e-6, clamped: false }
}

/// SeedVR2's goldens were computed in f32.
const fn seedvr2(checkpoint: &'static str, cases: &'static [&'static str]) -> Golden {
    Golden { most_error: 1e-5, ..known(checkpoint, cases, None) }
}

const GOLDENS: [Golden; 8] = [
    seedvr2("small", &["image", "clip5", "clip17", "batch2"]),
    seedvr2("medium", &["image", "clip9"]),
    known("families/sdxl", &["a", "batch2"], Some("sdxl")),
    known("families/flux", &["a"], Some("flux")),
    known("families/flux2", &["a"], None),
    known("families/wan21", &["image", "clip9", "clip17"], None),
    known("families/wan22", &["image", "clip9"], None),
    Golden { clamped: true, ..known("families/qwen21", &["a"], None) },
];

/// The clips of a batch. Images have no axis of time.
fn clips(tensor: &Tensor) -> Vec<Clip> {
    let dims = match tensor.shape[1..] {
        [c, t, h, w] => [c, t, h, w],
        [c, h, w] => [c, 1, h, w],
        _ => panic!("a clip of shape {:?}", tensor.shape),
    };
    let values: Vec<f64> = tensor.values.iter().map(|value| f64::from(*value)).collect();
    values.chunks_exact(dims.iter().product()).map(|clip| Clip { dims, values: clip.to_vec() }).collect()
}

/// Mean and log-variance of what an encoder gives.
fn halves(both: &Clip) -> [Clip; 2] {
    let [channels, frames, height, width] = both.dims;
    let half = |values: &[f64]| Clip { dims: [channels / 2, frames, height, width], values: values.to_vec() };
    let (mean, logvar) = both.values.split_at(both.values.len() / 2);
    [half(mean), half(logvar)]
}

/// What a diffusion model reads.
fn model_latent(latent: Latent, tensors: &Tensors, z: &Clip) -> Clip {
    match latent {
        Latent::Scaled { scale, shift } => z.clone().map(|value| (value - shift) * scale),
        Latent::Standardised { mean, deviation } => {
            assert_eq!([mean.len(), deviation.len()], [z.dims[0]; 2]);
            Clip::from_fn(z.dims, |c, t, y, x| (z.at(c, t, y, x) - mean[c]) / deviation[c])
        }
        Latent::Packed { side, mean, variance, epsilon } => {
            let ([channels, frames, height, width], side) = (z.dims, side as usize);
            let [mean, variance] = [mean, variance].map(|name| &tensors[name].values);
            Clip::from_fn([channels * side * side, frames, height / side, width / side], |c, t, y, x| {
                let value = z.at(c / (side * side), t, y * side + c / side % side, x * side + c % side);
                (value - f64::from(mean[c])) / (f64::from(variance[c]) + epsilon).sqrt()
            })
        }
    }
}

/// Root mean square of the error, relative to that of the expected values.
fn relative_error(found: &[Clip], expected: &[Clip]) -> f64 {
    assert!(found.iter().map(|clip| clip.dims).eq(expected.iter().map(|clip| clip.dims)), "shapes differ");
    let values = |clips: &[Clip]| clips.iter().flat_map(|clip| clip.values.clone()).collect::<Vec<f64>>();
    let (found, expected) = (values(found), values(expected));
    let difference: f64 = found.iter().zip(&expected).map(|(f, e)| (f - e).powi(2)).sum();
    (difference / expected.iter().map(|e| e.powi(2)).sum::<f64>()).sqrt()
}

#[test]
fn goldens_match_the_authors_implementation() {
    std::thread::scope(|scope| {
        for checkpoint in &GOLDENS {
            scope.spawn(move || {
                let (weights, model) = checkpoint.open();
                checkpoint.cases.iter().for_each(|case| checkpoint.check(case, &model, &weights));
            });
        }
    });
}

fn names_of<'a>(names: impl IntoIterator<Item = &'a String>) -> BTreeSet<&'a str> {
    names.into_iter().map(String::as_str).collect()
}

#[test]
fn graphs_read_every_tensor_of_a_checkpoint_once() {
    for golden in &GOLDENS {
        let (tensors, model) = golden.open();
        let graphs = [&model.encoder, &model.decoder];
        let mut names: Vec<String> = graphs.iter().flat_map(|graph| graph.tensors()).map(|read| read.name).collect();
        if let Latent::Packed { mean, variance, .. } = model.latent {
            names.extend([mean, variance].map(String::from));
        }
        assert_eq!(names_of(&names), names_of(tensors.keys()), "{}", golden.checkpoint);
        assert_eq!(names.len(), tensors.len(), "{}: a tensor is read twice", golden.checkpoint);
    }
}

/// SeedVR2 is published with diffusers' names only.
#[test]
fn diffusers_has_a_name_for_every_tensor() {
    for Golden { checkpoint, .. } in GOLDENS.iter().filter(|golden| golden.checkpoint.starts_with("families/")) {
        let mut tensors = read(&golden(&format!("{checkpoint}.safetensors")));
        tensors.remove("bn.num_batches_tracked");
        let file = std::fs::read(golden(&format!("{checkpoint}.diffusers.json"))).unwrap();
        let diffusers: BTreeMap<String, String> = serde_json::from_slice(&file).unwrap();
        assert_eq!(names_of(diffusers.keys()), names_of(tensors.keys()), "{checkpoint}");
        assert_eq!(names_of(diffusers.values()).len(), tensors.len(), "{checkpoint}: two tensors with one name");
    }
}

#[test]
fn a_checkpoint_is_of_one_family() {
    let folder = Folder::new("one-family");
    for (checkpoint, family) in [
        ("families/sdxl", "kl2d"),
        ("families/flux", "kl2d"),
        ("families/flux2", "kl2d"),
        ("families/wan21", "wan21"),
        ("families/wan22", "wan22"),
        ("families/qwen21", "qwen21"),
        ("small", "seedvr2"),
    ] {
        let path = golden(&format!("{checkpoint}.safetensors"));
        assert_eq!(Checkpoint::open(&path).unwrap().model().family.name, family);
        let Ok(map) = std::fs::read(golden(&format!("{checkpoint}.diffusers.json"))) else { continue };
        let map: BTreeMap<String, String> = serde_json::from_slice(&map).unwrap();
        let of = |name: &String| map.get(name).unwrap_or(name).clone();
        let diffusers: Tensors = read(&path).into_iter().map(|(name, tensor)| (of(&name), tensor)).collect();
        let path = folder.file("diffusers.safetensors", &to_bytes(&diffusers, 32));
        assert_eq!(Checkpoint::open(&path).unwrap().model().family.name, family, "with diffusers' names");
    }
}

/// One channel, one pixel, with frames 1, 2, 3 and so on.
fn frames(count: usize) -> Clip {
    Clip { dims: [1, count, 1, 1], values: (1..=count).map(|frame| frame as f64).collect() }
}

/// What becomes of frames 1 to 5 under the weights 100, 10, 1 and the bias 0.5.
fn over_time(first: FirstFrame, stride: u64) -> Vec<f64> {
    let mut graph = GraphBuilder::new(1);
    let conv = Conv {
        tensors: vec!["conv".into()],
        time: TimeAxis { kernel: 3, stride, first },
        space: SpaceAxis::POINT,
        weight_axes: 5,
    };
    graph.conv(GraphBuilder::INPUT, conv, 1);
    let weight = Tensor { shape: vec![1, 1, 3, 1, 1], values: vec![100.0, 10.0, 1.0] };
    let bias = Tensor { shape: vec![1], values: vec![0.5] };
    let tensors = Tensors::from([("conv.weight".into(), weight), ("conv.bias".into(), bias)]);
    evaluate(&graph.finish(), &tensors, frames(5)).values
}

#[test]
fn rules_for_the_first_frame() {
    let expected = [
        (FirstFrame::Repeated, [111.5, 112.5, 123.5, 234.5, 345.5]),
        (FirstFrame::AfterZeros, [1.5, 12.5, 123.5, 234.5, 345.5]),
        (FirstFrame::PassedAndRead, [1.0, 12.5, 123.5, 234.5, 345.5]),
        (FirstFrame::PassedAndHidden, [1.0, 2.5, 23.5, 234.5, 345.5]),
    ];
    for (first, expected) in expected {
        assert_eq!(over_time(first, 1), expected, "{first:?}");
        assert_eq!(over_time(first, 2), [expected[0], expected[2], expected[4]], "{first:?}, every second frame");
    }
}

/// A value is `100 * frame + channel`.
#[test]
fn channels_unfold_to_frames_and_pixels() {
    let mut graph = GraphBuilder::new(16);
    graph.unfold(GraphBuilder::INPUT, 2, 2);
    let input = Clip::from_fn([16, 2, 1, 1], |c, t, _, _| (100 * t + c) as f64);
    let found = evaluate(&graph.finish(), &Tensors::new(), input);
    assert_eq!(found.dims, [2, 3, 2, 2]);
    let expected = [
        [[0, 4, 8, 12], [100, 104, 108, 112], [102, 106, 110, 114]],
        [[1, 5, 9, 13], [101, 105, 109, 113], [103, 107, 111, 115]],
    ];
    let expected = expected.as_flattened().as_flattened().iter().map(|value| f64::from(*value));
    assert!(found.values.iter().copied().eq(expected), "{:?}", found.values);
}
