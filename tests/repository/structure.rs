//! Which file of `src/` may use which: the layers of `src/lib.rs`, and no cycle of files. Tests inside `src/` do not
//! count, and what a module takes from its parent is the parent's, wherever that has it from.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::common::root;

/// From the boundary inwards: a layer uses those after it.
const LAYERS: [&str; 8] = ["capi", "node", "exec", "report", "plan", "model", "backend", "ir"];
/// The planner and the models know no device.
const WITHOUT_BACKEND: [&str; 2] = ["plan", "model"];

/// The names of a path from the crate's root: of a module, or of what a module has.
type Module = Vec<String>;

/// Of each file, the paths that it names: `crate::a::b` and `super::b`, also within braces.
fn modules(folder: &Path, at: &Module, found: &mut BTreeMap<Module, Vec<Module>>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if ["tests", "testing"].contains(&&*name) {
            continue;
        }
        let module = if ["mod", "lib"].contains(&&*name) { at.clone() } else { [&at[..], &[name]].concat() };
        if path.is_dir() {
            modules(&path, &module, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            found.insert(module.clone(), named(&text, &module));
        }
    }
}

/// The paths in a file's text, from the crate's root.
fn named(text: &str, module: &Module) -> Vec<Module> {
    // Tests within the file come last.
    let tests = text.match_indices("#[cfg(test)]\nmod ").find(|(at, _)| {
        let module = text[*at..].lines().nth(1);
        module.is_some_and(|line| line.ends_with('{'))
    });
    let code = tests.map_or(text, |(at, _)| &text[..at]);
    let lines: Vec<_> = code.lines().map(|line| line.split("//").next().unwrap()).collect();
    let code = lines.join("\n");
    let mut paths = Vec::new();
    let mut rest = &*code;
    while let Some(at) = ["crate::", "super::"].iter().filter_map(|start| rest.find(start)).min() {
        let begins_word = !rest[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
        rest = &rest[at..];
        if begins_word {
            let (mut base, mut path) = (module.clone(), rest);
            while let Some(behind) = path.strip_prefix("super::") {
                base.pop();
                path = behind;
            }
            if let Some(behind) = path.strip_prefix("crate::") {
                (base, path) = (Vec::new(), behind);
            }
            tree(path, base, &mut paths);
        }
        // `super::` is as long.
        rest = &rest["crate::".len()..];
        // Those of `super::super::a` were read with the first.
        rest = rest.trim_start_matches("super::");
    }
    paths
}

/// Adds the paths of a tree such as `a::{b, c::D}` below `base`. Returns the text behind it.
fn tree<'a>(text: &'a str, base: Module, paths: &mut Vec<Module>) -> &'a str {
    let text = text.trim_start();
    if let Some(mut inner) = text.strip_prefix('{') {
        while !inner.trim_start().starts_with('}') {
            let behind = tree(inner, base.clone(), paths).trim_start();
            inner = behind.strip_prefix(',').unwrap_or(behind);
            assert!(inner.len() < text.len() && !inner.is_empty(), "a list that does not end: {text:.80}");
        }
        return &inner.trim_start()[1..];
    }
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_' && c != '*').unwrap_or(text.len());
    let path = [&base[..], &[text[..end].to_owned()]].concat();
    match text[end..].strip_prefix("::") {
        Some(behind) if behind.starts_with(|c: char| c.is_alphanumeric() || ['{', '_', '*'].contains(&c)) => {
            tree(behind, path, paths)
        }
        _ => {
            paths.push(path);
            let renamed = text[end..].trim_start().strip_prefix("as ");
            renamed.map_or(&text[end..], |name| name.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_'))
        }
    }
}

/// The file that has what a path names.
fn file_of<'a>(path: &'a Module, files: &BTreeMap<Module, Vec<Module>>) -> Option<&'a [String]> {
    (1..=path.len()).rev().map(|length| &path[..length]).find(|start| files.contains_key(*start))
}

/// Of each file, the other files that it uses. Between a module and those below it, uses in both ways are usual.
fn uses() -> BTreeMap<Module, BTreeSet<Module>> {
    let mut found = BTreeMap::new();
    modules(&root().join("src"), &Vec::new(), &mut found);
    let others = |module: &Module, paths: &[Module]| -> BTreeSet<Module> {
        let files = paths.iter().filter_map(|path| file_of(path, &found)).map(<[String]>::to_vec);
        files.filter(|file| !file.starts_with(module) && !module.starts_with(file)).collect()
    };
    found.iter().map(|(module, paths)| (module.clone(), others(module, paths))).collect()
}

#[test]
fn files_have_no_cycle() {
    let mut left = uses();
    assert!(left.len() > 200 && left.values().map(BTreeSet::len).sum::<usize>() > 500, "files were not read");
    // Files that use no other file that is left are in no cycle.
    loop {
        let files: BTreeSet<Module> = left.keys().cloned().collect();
        let before = left.len();
        left.retain(|_, uses| uses.iter().any(|used| files.contains(used)));
        if left.len() == before {
            break;
        }
    }
    let files: Vec<String> = left.keys().map(|module| module.join("/")).collect();
    assert!(files.is_empty(), "there is a cycle among these files, or they lead to one: {files:?}");
}

#[test]
fn layers_use_those_below_them() {
    let layer_of = |module: &Module| LAYERS.iter().position(|layer| module.first().is_some_and(|first| first == layer));
    for (module, used) in uses() {
        for other in used {
            let Some(below) = layer_of(&other) else { continue };
            // Files outside the layers, such as `error`, use no layer.
            let is_below = layer_of(&module).is_some_and(|own| own <= below);
            let is_device = LAYERS[below] == "backend" && WITHOUT_BACKEND.contains(&&*module[0]);
            assert!(is_below && !is_device, "{} uses {}", module.join("/"), other.join("/"));
        }
    }
}
