//! The passes, each by itself: recipes against their definition and against the tables that they replace, pairs against
//! the sums that they stand for, fusion and stages on small graphs.

use super::recipes::PAIR_SLABS;
use super::recipes::{Pairs, Product, Recipes, TimeRule, pair_of};
use super::*;
use crate::ir::{Norm, Prologue, Window};
use crate::model::families::seedvr2::Sizes;
use crate::model::graph::{Conv, FirstFrame, Folding, GraphBuilder, NodeId, NormKind, SpaceAxis, TimeAxis};
use crate::model::network::{LevelMap, LevelShortcut, Reader, Role, Source};
use crate::testing;

const STILL: TimeRule = TimeRule::of(TimeAxis::POINT);
const CAUSAL: TimeRule = TimeRule::of(TimeAxis::causal(FirstFrame::Repeated));
const HALVE: TimeRule = TimeRule::of(TimeAxis::halving(FirstFrame::Repeated));
const DOUBLE: TimeRule = TimeRule { unfold: 2, ..CAUSAL };
const ZEROS: TimeRule = TimeRule::of(TimeAxis::causal(FirstFrame::AfterZeros));
const PAIRED: TimeRule = TimeRule { pairs: Pairs::Plain, ..CAUSAL };
const PAIRED_ZEROS: TimeRule = TimeRule { pairs: Pairs::Plain, ..ZEROS };
/// Convolutions over time that pass the first frame on.
const PASS_HALVE: TimeRule = TimeRule::of(TimeAxis::halving(FirstFrame::PassedAndRead));
const PASS_SPLIT: TimeRule = TimeRule { split: 2, ..TimeRule::of(TimeAxis::causal(FirstFrame::PassedAndHidden)) };
const RULES: [TimeRule; 7] = [STILL, CAUSAL, HALVE, DOUBLE, ZEROS, PASS_HALVE, PASS_SPLIT];

/// The definition: what an output frame reads, oldest first, as (input frame, product).
fn history(rule: TimeRule, frame: u64) -> Vec<(u64, Product)> {
    // Output 0 of the convolution is split into one frame, the others into `split` each.
    let (convolved, split_part) = match frame.checked_sub(1) {
        None => (0, 0),
        Some(later) => (1 + later / rule.split, later % rule.split),
    };
    let newest = (rule.axis.stride * convolved) as i64;
    let read = |tap: i64| -> Option<(u64, Product)> {
        let unfolded = newest - (rule.axis.kernel as i64 - 1) + tap;
        let first_read = match rule.axis.first {
            FirstFrame::Repeated => i64::MIN,
            FirstFrame::AfterZeros | FirstFrame::PassedAndRead => 0,
            FirstFrame::PassedAndHidden => 1,
        };
        if unfolded < first_read {
            return None;
        }
        // Frame 0 is unfolded into one frame, the others into `unfold` each.
        let (mut input, mut end) = (0, 1);
        while end <= unfolded.max(0) as u64 {
            (input, end) = (input + 1, end + rule.unfold);
        }
        let part = if input == 0 { 0 } else { unfolded as u64 - (end - rule.unfold) };
        Some((input, (tap as usize, (part + split_part) as usize)))
    };
    (0..rule.axis.kernel as i64).filter_map(read).collect()
}

/// The terms of a recipe: input frames and slabs.
fn pairs_of(recipe: &Recipe) -> Vec<(u64, u8)> {
    recipe.terms().iter().map(|term| (term.input, term.slab)).collect()
}

#[test]
fn recipes_have_exactly_the_products_of_the_definition() {
    for rule in RULES {
        let recipes = Recipes::new(rule);
        for frame in 0..20 {
            let recipe = recipes.recipe(frame);
            assert_eq!(recipe.is_passed, frame == 0 && rule.passes_first(), "{rule:?} frame {frame}");
            if recipe.is_passed {
                assert_eq!(recipe.terms()[0].input, 0);
                continue;
            }
            let mut found: Vec<(u64, Product)> = Vec::new();
            for term in recipe.terms() {
                let slab = &recipes.slabs()[usize::from(term.slab)];
                found.extend(slab.products.iter().map(|product| (term.input, *product)));
            }
            found.sort_unstable_by_key(|(_, product)| *product);
            assert_eq!(found, history(rule, frame), "{rule:?} frame {frame}");
            let products: Vec<Product> = found.iter().map(|(_, product)| *product).collect();
            let bias = &recipes.biases()[usize::from(recipe.bias)];
            // The convolution has its whole bias where some of its taps fall on zeros.
            assert!(products.iter().all(|product| bias.contains(product)), "bias of {rule:?} frame {frame}");
            assert_eq!(bias.len() as u64, rule.axis.kernel, "bias of {rule:?} frame {frame}");
            assert!(recipe.terms().is_sorted_by_key(|term| term.input), "{rule:?} frame {frame}");
        }
    }
}

/// Kernels know these numbers: slabs of the steady state first, that of frame 0 last.
#[test]
fn slabs_have_the_numbers_that_kernels_know() {
    let slabs = |rule| Recipes::new(rule).slabs().iter().map(|slab| slab.products.clone()).collect::<Vec<_>>();
    let causal = [vec![(0, 0)], vec![(1, 0)], vec![(2, 0)], vec![(0, 0), (1, 0)], vec![(0, 0), (1, 0), (2, 0)]];
    assert_eq!(slabs(STILL), causal[..1]);
    assert_eq!(slabs(CAUSAL), causal);
    assert_eq!(slabs(HALVE), [&causal[..3], &causal[4..]].concat());
    assert_eq!(slabs(PAIRED), [4, 4, 0, 2, 4].map(|slab: usize| causal[slab].clone()));
    assert_eq!(slabs(ZEROS), causal[..3]);
    assert_eq!(slabs(PAIRED_ZEROS), [4, 4, 0, 2, 2, 1].map(|slab: usize| causal[slab].clone()));
    assert_eq!(slabs(PASS_HALVE), causal[..3]);
    let split = |part| [0, 1, 2].map(|tap| vec![(tap, part)]);
    assert_eq!(slabs(PASS_SPLIT), [split(0), split(1)].concat());
    assert_eq!([ZEROS, PAIRED_ZEROS, PASS_SPLIT].map(|rule| Recipes::new(rule).biases().len()), [1, 1, 2]);
    let double = [
        vec![(0, 0), (1, 1)],         // odd frame 2t - 1, from input t - 1
        vec![(2, 0)],                 // odd frame, from input t
        vec![(0, 1)],                 // even frame 2t, from input t - 1
        vec![(1, 0), (2, 1)],         // even frame, from input t
        vec![(0, 0), (1, 0)],         // frame 1, from input 0, which has one frame
        vec![(0, 0)],                 // frame 2, from input 0
        vec![(0, 0), (1, 0), (2, 0)], // frame 0
    ];
    assert_eq!(slabs(DOUBLE), double);
    let biases = [
        vec![(0, 0), (1, 1), (2, 0)], // odd frames
        vec![(0, 1), (1, 0), (2, 1)], // even frames
        vec![(0, 0), (1, 0), (2, 0)], // frames 0 and 1
        vec![(0, 0), (1, 0), (2, 1)], // frame 2
    ];
    assert_eq!(Recipes::new(DOUBLE).biases(), biases);
    for rule in [CAUSAL, HALVE, PAIRED] {
        assert_eq!(Recipes::new(rule).biases(), &biases[2..3], "{rule:?}");
    }
    let terms = |rule, frame| pairs_of(&Recipes::new(rule).recipe(frame));
    assert_eq!(
        [0, 1, 5].map(|frame| terms(CAUSAL, frame)),
        [vec![(0, 4)], vec![(0, 3), (1, 2)], vec![(3, 0), (4, 1), (5, 2)]]
    );
    assert_eq!([0, 3].map(|frame| terms(HALVE, frame)), [vec![(0, 3)], vec![(4, 0), (5, 1), (6, 2)]]);
    assert_eq!(
        [0, 1, 2, 7, 8].map(|frame| terms(DOUBLE, frame)),
        [vec![(0, 6)], vec![(0, 4), (1, 1)], vec![(0, 5), (1, 3)], vec![(3, 0), (4, 1)], vec![(3, 2), (4, 3)]]
    );
    assert_eq!(
        [0, 1, 2, 7, 8].map(|frame| terms(PAIRED, frame)),
        [
            vec![(0, 4)],
            vec![(0, 2), (0, 0), (1, 1)],
            vec![(0, 0), (1, 1), (2, 3)],
            vec![(5, 2), (6, 0), (7, 1)],
            vec![(6, 0), (7, 1), (8, 3)]
        ]
    );
}

/// Every frame of a pair, from the slabs and the transformed inputs, against the definition.
#[test]
fn pairs_have_the_sums_of_the_definition() {
    let taps = [3.0, -5.0, 7.0];
    let input = |frame: u64| (frame * frame) as f64 + 2.0;
    let rules = [CAUSAL, ZEROS].into_iter().flat_map(|rule| [(rule, Pairs::Plain), (rule, Pairs::Halved)]);
    for (frame, (rule, pairs)) in (0..12).flat_map(|frame| rules.clone().map(move |rule| (frame, rule))) {
        let recipes = Recipes::new(TimeRule { pairs, ..rule });
        let slab = |slab: usize| {
            let halved = if pairs == Pairs::Halved && PAIR_SLABS.contains(slab as u64) { 0.5 } else { 1.0 };
            let of = &recipes.slabs()[slab];
            of.products.iter().zip(&of.factors).map(|((tap, _), factor)| taps[*tap] * factor * halved).sum::<f64>()
        };
        let expected: f64 = history(rule, frame).iter().map(|(t, (tap, _))| input(*t) * taps[*tap]).sum();
        let d: Vec<(f64, u8)> = pairs_of(&recipes.recipe(frame)).iter().map(|(t, s)| (input(*t), *s)).collect();
        let found = match d[..] {
            [(x, 4)] => slab(4) * x,
            [(older, 5), (x, 4)] => slab(5) * older + slab(4) * x,
            [(d0, 2), (d1, 0), (d2, 1)] => slab(0) * (d1 + d2) + slab(1) * (d2 - d1) + slab(2) * (d0 - d2),
            [(d1, 0), (d2, 1), (d3, 3)] => slab(0) * (d1 + d2) - slab(1) * (d2 - d1) + slab(3) * (d1 - d3),
            _ => panic!("frame {frame}: {d:?}"),
        };
        assert_eq!(found, expected, "frame {frame}");
    }
}

/// Backends compute the first frame in a form of its own, and refuse frames that mix the forms.
#[test]
fn the_slab_of_the_first_frame_is_alone() {
    let network = testing::network(&Sizes::published(), Direction::Decode);
    let layers = [network.layers.clone(), network.with_pairs().layers].concat();
    let mut with_slab = 0;
    for layer in layers {
        let first = layer.layout.first_frame_slab;
        with_slab += usize::from(first.is_some());
        for frame in 0..12 {
            let recipe = layer.time.recipe(frame);
            let found = recipe.terms().iter().any(|term| Some(term.slab) == first);
            assert_eq!(found, first.is_some() && frame == 0, "{} {frame}", layer.name());
            assert!(!found || recipe.terms().len() == 1, "{} {frame}", layer.name());
        }
    }
    assert!(with_slab > 20, "{with_slab}");
}

#[test]
fn outputs_are_those_that_the_inputs_suffice_for() {
    for rule in [&RULES[..], &[PAIRED, PAIRED_ZEROS]].concat() {
        let recipes = Recipes::new(rule);
        for frame in 0..12 {
            let end = recipes.input_end(frame);
            assert!(recipes.outputs(end) > frame && recipes.outputs(end - 1) <= frame, "{rule:?} {frame}");
            assert!((frame..40).all(|later| recipes.recipe(later).terms()[0].input >= recipes.oldest(frame)));
        }
    }
    assert_eq!((pair_of(0), pair_of(1), pair_of(2), pair_of(3)), (0, 1, 1, 2));
}

fn conv(tensor: &str, time: TimeAxis, space: SpaceAxis) -> Conv {
    Conv { tensors: vec![tensor.into()], time, space, weight_axes: 5 }
}

fn same(tensor: &str) -> Conv {
    conv(tensor, CAUSAL.axis, SpaceAxis::SAME)
}

fn lowered(build: impl FnOnce(&mut GraphBuilder) -> NodeId) -> Result<Network, String> {
    let mut graph = GraphBuilder::new(4);
    let last = build(&mut graph);
    assert_eq!(last, graph.conv(last, same("last"), 4) - 1, "a graph ends with its last node");
    let geometry = Geometry { pixel_channels: 3, latent_channels: 4, space: 1, time: 1, patch: 1, packing: 1 };
    lower(&graph.finish(), Direction::Encode, geometry)
}

#[test]
fn a_block_becomes_two_layers_and_a_shortcut_a_slab() {
    let network = lowered(|graph| {
        let x = graph.conv(GraphBuilder::INPUT, same("first"), 8);
        let norm = graph.norm(x, "norm", NormKind::Group { groups: 4, epsilon: 1e-6 });
        let silu = graph.silu(norm);
        let out = graph.conv(silu, same("conv"), 6);
        let shortcut = graph.conv(x, conv("shortcut", TimeAxis::POINT, SpaceAxis::POINT), 6);
        graph.add(shortcut, out)
    })
    .unwrap();
    let [first, block, last] = &network.layers[..] else { panic!("{:?}", network.layers) };
    assert_eq!((first.input, first.addend, first.statistics), (Source::Input, None, true));
    assert_eq!((block.input, block.addend), (Source::Layer(0), Some(Source::Layer(0))));
    assert_eq!((block.layout.shortcut, block.layout.prologue, block.statistics), (Some(8), Prologue::NormSilu, false));
    assert_eq!((last.input, last.layout.cin, last.layout.prologue), (Source::Layer(1), 6, Prologue::None));
    let readers = [Reader { layer: 1, role: Role::Input }, Reader { layer: 1, role: Role::Shortcut }];
    assert_eq!(network.readers(0), readers);
    assert_eq!((network.stages.len(), network.norm), (1, Norm::Group { groups: 4 }));
}

#[test]
fn what_no_backend_computes_is_refused_by_its_node() {
    let refused = |build: &dyn Fn(&mut GraphBuilder) -> NodeId| lowered(build).unwrap_err();
    let mixed = refused(&|graph| {
        let x = graph.conv(GraphBuilder::INPUT, same("first"), 8);
        let norm = graph.norm(x, "pixel", NormKind::Pixel { trailing_axes: 3 });
        let x = graph.conv(norm, same("conv"), 8);
        let norm = graph.norm(x, "group", NormKind::Group { groups: 4, epsilon: 1e-6 });
        graph.conv(norm, same("other"), 8)
    });
    assert!(mixed.contains("node 4 (norm \"group\")") && mixed.contains("kind"), "{mixed}");
    let passing = |axis: TimeAxis, space: SpaceAxis| {
        refused(&|graph| graph.conv(GraphBuilder::INPUT, conv("time", axis, space), 4))
    };
    let wide = passing(PASS_HALVE.axis, SpaceAxis::HALVING);
    assert!(wide.contains("\"time\"") && wide.contains("as it is"), "{wide}");
    let body = refused(&|graph| {
        let x = graph.conv(GraphBuilder::INPUT, same("first"), 4);
        graph.conv(x, conv("time", PASS_SPLIT.axis, SpaceAxis::POINT), 4)
    });
    assert!(body.contains("passes its first frame but begins no frame rate"), "{body}");
    let channels =
        refused(&|graph| graph.conv(GraphBuilder::INPUT, conv("time", PASS_HALVE.axis, SpaceAxis::POINT), 8));
    assert!(channels.contains("other channels"), "{channels}");
    let unread = refused(&|graph| {
        let x = graph.conv(GraphBuilder::INPUT, conv("time", PASS_HALVE.axis, SpaceAxis::POINT), 4);
        let norm = graph.norm(x, "norm", NormKind::Group { groups: 4, epsilon: 1e-6 });
        graph.conv(norm, same("conv"), 4)
    });
    assert!(unread.contains("passes the input on to a norm of groups"), "{unread}");
    let folding = Folding { frames: 2, side: 2, still: false };
    let around = |channels: u64, folding: Folding| {
        refused(&|graph| {
            let x = graph.conv(GraphBuilder::INPUT, same("first"), 4);
            let small =
                graph.conv(x, conv("down", TimeAxis::halving(FirstFrame::AfterZeros), SpaceAxis::HALVING), channels);
            let mean = graph.fold_mean(x, folding, channels);
            graph.add(small, mean)
        })
    };
    for text in [around(4, folding), around(16, folding)] {
        assert!(text.contains("mean of folded channels") && text.contains("its channels"), "{text}");
    }
    let rate = around(4, Folding { frames: 1, ..folding });
    assert!(rate.contains("differ in resolution or frame rate"), "{rate}");
    let input = refused(&|graph| {
        let small = graph.conv(GraphBuilder::INPUT, conv("down", TimeAxis::POINT, SpaceAxis::HALVING), 4);
        let mean = graph.fold_mean(GraphBuilder::INPUT, Folding { frames: 1, ..folding }, 4);
        graph.add(small, mean)
    });
    assert!(input.contains("adds the input around a level"), "{input}");
    let statistics = refused(&|graph| {
        let x = graph.conv(GraphBuilder::INPUT, same("first"), 4);
        let small = graph.conv(x, conv("down", TimeAxis::POINT, SpaceAxis::HALVING), 4);
        let mean = graph.fold_mean(x, Folding { frames: 1, ..folding }, 4);
        let sum = graph.add(small, mean);
        let norm = graph.norm(sum, "norm", NormKind::Group { groups: 4, epsilon: 1e-6 });
        graph.conv(norm, same("conv"), 4)
    });
    assert!(statistics.contains("gathers statistics"), "{statistics}");
    let patches = refused(&|graph| graph.patch(GraphBuilder::INPUT, 2));
    assert!(patches.contains("node 1 (patches)"), "{patches}");
    let nearest = refused(&|graph| graph.nearest(GraphBuilder::INPUT, 3));
    assert!(nearest.contains("node 1 (nearest neighbour)"), "{nearest}");
    let silu = refused(&|graph| graph.silu(GraphBuilder::INPUT));
    assert!(silu.contains("follows no norm"), "{silu}");
    let later = refused(&|graph| {
        let x = graph.conv(GraphBuilder::INPUT, same("first"), 4);
        let silu = graph.silu(x);
        let out = graph.conv(x, same("conv"), 4);
        graph.add(out, silu)
    });
    assert!(later.contains("addition") && later.contains("fused away"), "{later}");
    let head = refused(&|graph| {
        let x = graph.conv(GraphBuilder::INPUT, same("first"), 4);
        let norm = graph.norm(x, "norm", NormKind::Group { groups: 4, epsilon: 1e-6 });
        graph.conv(norm, conv("down", TimeAxis::POINT, SpaceAxis::HALVING), 4)
    });
    assert!(head.contains("begins a resolution behind a norm"), "{head}");
    let joined = refused(&|graph| {
        let x = graph.conv(GraphBuilder::INPUT, same("first"), 4);
        let down = graph.conv(x, conv("down", TimeAxis::POINT, SpaceAxis::HALVING), 4);
        graph.add(x, down)
    });
    assert!(joined.contains("differ in resolution"), "{joined}");
}

#[test]
fn stages_are_runs_of_one_resolution_and_rate() {
    for direction in Direction::ALL {
        let network = testing::network(&Sizes::published(), direction);
        let lengths: Vec<usize> = network.stages.iter().map(|stage| stage.layers.len()).collect();
        let expected: [usize; 4] = match direction {
            Direction::Encode => [5, 5, 5, 12],
            Direction::Decode => [13, 7, 7, 8],
        };
        assert_eq!(lengths, expected);
        let windows: Vec<Window> =
            network.stages.iter().map(|stage| network.layers[stage.head()].layout.window).collect();
        let change = if direction == Direction::Encode { Window::Down } else { Window::Up };
        assert_eq!(windows, [Window::Same, change, change, change]);
        assert_eq!(network.largest_stage(), if direction == Direction::Encode { 0 } else { 3 });
        assert_eq!(
            network.later_stage_frames(network.latent_rate()),
            match direction {
                Direction::Encode => [4, 4, 2, 1],
                Direction::Decode => [1, 2, 4, 4],
            }
        );
    }
}

/// A value goes around a level by an edge of the layer behind it, and is computed again by nobody.
#[test]
fn shortcuts_around_levels_are_edges_across_stages() {
    let network = lowered(|graph| {
        let x = graph.conv(GraphBuilder::INPUT, conv("first", ZEROS.axis, SpaceAxis::SAME), 8);
        let half = graph.conv(x, conv("down", TimeAxis::POINT, SpaceAxis::HALVING), 16);
        let half = graph.conv(half, conv("half", PASS_HALVE.axis, SpaceAxis::POINT), 16);
        let mean = graph.fold_mean(x, Folding { frames: 2, side: 2, still: false }, 16);
        let x = graph.add(half, mean);
        let norm = graph.norm(x, "norm", NormKind::Pixel { trailing_axes: 3 });
        let inner = graph.conv(norm, conv("body", ZEROS.axis, SpaceAxis::SAME), 16);
        let inner = graph.add(x, inner);
        let x = graph.add(inner, x);
        let large = graph.nearest(x, 2);
        let large = graph.conv(large, conv("up", TimeAxis::POINT, SpaceAxis::SAME), 8);
        let repeated = graph.repeat_unfold(x, Folding { frames: 1, side: 2, still: false }, 8);
        graph.add(repeated, large)
    })
    .unwrap();
    let levels: Vec<_> = network.layers.iter().map(|layer| layer.level.map(|level| (level.from, level.map))).collect();
    let repeat = |side| LevelMap::Repeat { side };
    assert_eq!(levels, [None, None, Some((0, LevelMap::Mean)), Some((2, repeat(1))), Some((3, repeat(2))), None]);
    assert_eq!(network.layers[3].addend, Some(Source::Layer(2)));
    assert_eq!([0, 2, 3].map(|layer| network.added_around(layer).to_vec()), [[2], [3], [4]]);
    assert!((0..5).all(|layer| !network.may_stream(layer)));
    let level = network.layers[2].level.unwrap();
    assert_eq!([0, 1, 2, 3].map(|frame| (level.part(frame), level.smaller(frame))), [(1, 0), (0, 1), (1, 1), (0, 2)]);
    assert_eq!([0, 1, 2].map(|frame| level.oldest(frame)), [0, 1, 3]);
    let still = LevelShortcut { still: true, ..level };
    assert_eq!(
        [0, 1, 2].map(|frame| (still.part(frame), still.smaller(frame), still.oldest(frame))),
        [(1, 0, 0), (1, 1, 1), (1, 2, 2)]
    );
}

/// The questions that the planner asks, on a network whose answers are known.
#[test]
fn layers_and_edges_answer_the_planner() {
    let network = testing::network(&Sizes::published(), Direction::Decode);
    let last = &network.stages[3];
    let [head, first, second] = [0, 1, 2].map(|at| last.head() + at);
    assert_eq!(network.layers[second].layout.shortcut, Some(256));
    // The upsampler's output is read by the first block alone, through a shortcut.
    assert!(network.may_stream(head) && network.recomputed_by(first) == Some(head));
    assert_eq!((network.hidden_by(second), network.hidden_by(first)), (None, None));
    // The second block adds what its first layer reads.
    assert_eq!(network.hidden_by(second + 2), Some(second + 1));
    assert!(!network.may_stream(second) && network.may_stream(second + 1));
    assert!(network.is_last_reader(second, second + 2) && !network.is_last_reader(second, second + 1));
    assert_eq!((network.stage_of(head), network.stage_of(head - 1)), (3, 2));
    let paired = network.clone().with_pairs();
    let is_paired: Vec<bool> = last.layers.clone().map(|layer| paired.layers[layer].layout.pairs.is_some()).collect();
    assert_eq!(is_paired, [false, true, true, true, true, true, true, false]);
}

/// Rates change in stages of their own. Whoever reads a passed frame finds its statistics.
#[test]
fn convolutions_over_time_begin_stages_and_pass_their_first_frame() {
    let network = lowered(|graph| {
        let x = graph.conv(GraphBuilder::INPUT, conv("first", ZEROS.axis, SpaceAxis::SAME), 8);
        let half = graph.conv(x, conv("half", PASS_HALVE.axis, SpaceAxis::POINT), 8);
        let split = graph.conv(half, conv("double", PASS_SPLIT.axis, SpaceAxis::POINT), 16);
        let double = graph.unfold(split, 2, 1);
        let norm = graph.norm(double, "norm", NormKind::Group { groups: 4, epsilon: 1e-6 });
        graph.conv(norm, same("conv"), 4)
    })
    .unwrap();
    assert_eq!(network.stages.iter().map(|stage| stage.layers.clone()).collect::<Vec<_>>(), [0..1, 1..2, 2..5]);
    let layouts: Vec<_> = network.layers.iter().map(|layer| layer.layout).collect();
    assert_eq!((layouts[1].cin, layouts[1].cout, layouts[1].slabs, layouts[1].biases), (8, 8, 3, 1));
    assert_eq!((layouts[2].cin, layouts[2].cout, layouts[2].slabs, layouts[2].biases), (8, 8, 6, 2));
    let statistics: Vec<bool> = network.layers.iter().map(|layer| layer.statistics).collect();
    assert_eq!(statistics, [true, true, true, false, false]);
    assert_eq!(
        [1, 2, 5, 9].map(|frames| network.stage_frames(frames)[1..3].to_vec()),
        [[1, 1], [1, 1], [3, 5], [5, 9]]
    );
}
