//! Divides layers into stages: runs of one resolution and frame rate.

use super::fuse::Fused;
use super::shapes::Extent;
use crate::ir::LayerId;
use crate::model::network::{Source, Stage};

/// The stages of a network's layers. The schedule needs a chain: the first layer of a stage reads the last one of the
/// stage before, and nothing else crosses from stage to stage but shortcuts around levels.
pub fn divide(layers: &[Fused], shapes: &[Extent]) -> Result<Vec<Stage>, String> {
    let mut stages: Vec<Stage> = Vec::new();
    for (id, fused) in layers.iter().enumerate() {
        let extent = |layer: &Fused| shapes[layer.node];
        match stages.last_mut() {
            Some(stage) if extent(fused) == extent(&layers[stage.head()]) => stage.layers.end = id + 1,
            _ => stages.push(Stage { layers: id..id + 1 }),
        }
    }
    stages.iter().enumerate().try_for_each(|(index, stage)| check(layers, &stages, index, stage))?;
    Ok(stages)
}

fn check(layers: &[Fused], stages: &[Stage], index: usize, stage: &Stage) -> Result<(), String> {
    let before = index.checked_sub(1).map_or(Source::Input, |before| Source::Layer(stages[before].last()));
    let head = &layers[stage.head()].layer;
    if head.input != before || head.addend.is_some() {
        return Err(format!("layer {} begins a resolution but does not read the layer before it alone", stage.head()));
    }
    if head.norm.is_some() || head.attends {
        return Err(format!(
            "layer {} begins a resolution behind a norm or attention; no backend computes it yet",
            stage.head()
        ));
    }
    if let Some(layer) = stage.body().find(|layer| layers[*layer].layer.time.rule.passes_first()) {
        return Err(format!(
            "layer {layer} passes its first frame but begins no frame rate; no backend computes it yet"
        ));
    }
    if head.time.rule.passes_first() && head.layout.cin != head.layout.cout {
        return Err(format!("layer {} passes a frame of other channels than its own", stage.head()));
    }
    let inside = |source: &Source| matches!(source, Source::Layer(layer) if stage.layers.contains(layer));
    let crosses = |layer: &LayerId| {
        let layer = &layers[*layer].layer;
        !inside(&layer.input) || !layer.addend.iter().all(inside)
    };
    match stage.body().find(crosses) {
        Some(layer) => Err(format!("layer {layer} reads a value of another resolution or frame rate")),
        None => Ok(()),
    }
}
