//! Only `src/model/families` knows a family: no other source names its tensors or has its constants.

mod common;

use std::path::{Path, PathBuf};

use common::root;
use video_vae::model::families::seedvr2::Sizes;

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The product's part of a source: without unit tests, which may use any model.
fn product(path: &Path) -> Option<String> {
    let relative = path.strip_prefix(root()).unwrap().to_string_lossy().replace('\\', "/");
    let is_test = relative.contains("/tests") || relative.ends_with("testing.rs");
    let is_family = relative.starts_with("src/model/families/");
    let text = std::fs::read_to_string(path).unwrap();
    (!is_test && !is_family).then(|| text.split("#[cfg(test)]\nmod tests {").next().unwrap().to_owned())
}

/// Texts between quotation marks.
fn literals(source: &str) -> Vec<String> {
    let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    code.flat_map(|line| line.split('"').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>()).collect()
}

#[test]
fn no_source_outside_the_families_names_a_tensor() {
    // The parts of all names, without numbers: "down_blocks", "resnets", "conv_shortcut" and so on.
    let tensors = Sizes::published().model().tensors();
    let parts: std::collections::BTreeSet<&str> = tensors.iter().flat_map(|tensor| tensor.name.split('.')).collect();
    // Words that are no names of this family alone: sides of a network, kinds of tensors, CUDA's own kernels.
    let general = ["encoder", "decoder", "weight", "bias", "conv", "conv_in", "conv_out"];
    let named: Vec<&str> =
        parts.into_iter().filter(|part| part.parse::<u64>().is_err() && !general.contains(part)).collect();
    assert!(named.contains(&"upscale_conv") && named.contains(&"to_q"), "{named:?}");
    let mut files = Vec::new();
    sources(&root().join("src"), &mut files);
    assert!(files.len() > 100);
    for file in files {
        for literal in product(&file).iter().flat_map(|text| literals(text)) {
            let words: Vec<&str> = literal.split(['.', '{', '}', ' ', '/', '\\']).collect();
            let found = named.iter().find(|name| words.contains(name));
            assert!(found.is_none(), "{} names the tensor part {found:?} in {literal:?}", file.display());
            let sided = ["encoder.", "decoder."].iter().any(|side| literal.contains(side));
            assert!(!sided, "{} names a tensor in {literal:?}", file.display());
        }
    }
}

#[test]
fn no_source_outside_the_families_has_their_constants_or_names() {
    let mut files = Vec::new();
    sources(&root().join("src"), &mut files);
    for file in files {
        let Some(text) = product(&file) else { continue };
        for word in ["0.9152", "SeedVR2", "seedvr2", "norm_num_groups"] {
            // The list of families is in their own folder.
            assert!(!text.contains(word), "{} has {word:?}", file.display());
        }
    }
}
