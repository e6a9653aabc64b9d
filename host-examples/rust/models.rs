//! Published checkpoints by name: where they come from, and where they lie on this machine. The folders are those of
//! the hub's own programs, so that a file is on the disk once.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::Result;

/// The checkpoint that the project ships: in the source tree, in an installed prefix, beside the command in a wheel.
const DEMO_WEIGHTS: &str = "host-examples/assets/demo.safetensors";
const INSTALLED_WEIGHTS: [&str; 2] = ["share/video-vae/demo.safetensors", "demo.safetensors"];

/// The word for the checkpoint that the project ships.
pub const DEMO: &str = "demo";

const TABLE: &str = include_str!("../assets/models.json");
const HUB: &str = "https://huggingface.co";

/// A published checkpoint. Size and checksum where they are known beforehand.
#[derive(Debug, Clone)]
pub struct Model {
    pub name: String,
    pub title: String,
    pub licence: String,
    pub repository: String,
    /// Within the repository.
    pub path: String,
    pub size: Option<u64>,
    pub sha256: Option<String>,
}

impl Model {
    pub fn file_name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or(&self.path)
    }

    /// The file's address.
    pub fn address(&self) -> String {
        format!("{}/resolve/main/{}", self.page(), self.path)
    }

    /// The page for people.
    pub fn page(&self) -> String {
        format!("{}/{}", endpoint(), self.repository)
    }

    /// The repository's folder in the hub's cache.
    pub fn folder(&self) -> Result<PathBuf> {
        Ok(hub_cache()?.join(format!("models--{}", self.repository.replace('/', "--"))))
    }

    /// The file in the hub's cache: of the version that was last asked for, else of any.
    pub fn find(&self) -> Option<PathBuf> {
        let folder = self.folder().ok()?;
        let last = std::fs::read_to_string(folder.join("refs/main")).unwrap_or_default();
        let versions = std::fs::read_dir(folder.join("snapshots")).ok()?.flatten();
        let mut versions: Vec<PathBuf> = versions.map(|entry| entry.path()).collect();
        versions.sort_by_key(|path| (!path.ends_with(last.trim()), path.clone()));
        versions.into_iter().map(|version| version.join(&self.path)).find(|path| path.is_file())
    }
}

/// All that are known by name.
pub fn known() -> Vec<Model> {
    let table: Value = serde_json::from_str(TABLE).expect("models.json is JSON");
    let models = table["models"].as_array().expect("models.json has a list");
    let text = |model: &Value, key: &str| model[key].as_str().unwrap_or_default().to_owned();
    let read = |model: &Value| Model {
        name: text(model, "name"),
        title: text(model, "title"),
        licence: text(model, "licence"),
        repository: text(model, "repository"),
        path: text(model, "path"),
        size: model["size"].as_u64(),
        sha256: model["sha256"].as_str().map(str::to_owned),
    };
    models.iter().map(read).collect()
}

/// The model of this name.
pub fn named(name: &str) -> Option<Model> {
    known().into_iter().find(|model| model.name == name)
}

/// Around the executable, or in the source tree that this was built from.
pub fn demo_weights() -> Result<PathBuf> {
    let executable = std::env::current_exe().unwrap_or_default();
    let folders = || executable.ancestors().skip(1);
    let installed = folders().take(2).flat_map(|folder| INSTALLED_WEIGHTS.map(|name| folder.join(name)));
    let built_from = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let sources = folders().chain([built_from]).map(|root| root.join(DEMO_WEIGHTS));
    installed
        .chain(sources)
        .find(|path| path.is_file())
        .ok_or_else(|| format!("the demo's checkpoint, {DEMO_WEIGHTS}, is not here; pass another with --weights FILE"))
}

/// The file that a word stands for: `demo`, the name of a model that was downloaded, or a path.
pub fn resolve(weights: &Path) -> Result<PathBuf> {
    let word = weights.to_str().unwrap_or_default();
    if word == DEMO {
        return demo_weights();
    }
    match named(word) {
        Some(model) => model.find().ok_or_else(|| {
            format!("{word} is not on this machine; get it with: vvae get {word} (or write ./{word} for a file)")
        }),
        // Without a point and a folder it was meant as a name.
        None if !word.is_empty() && !word.contains(['.', '/', '\\']) && !weights.exists() => Err(neither(word)),
        None => Ok(weights.to_owned()),
    }
}

fn neither(word: &str) -> String {
    let names: Vec<String> = known().into_iter().map(|model| model.name).collect();
    format!("\"{word}\" is no file here and no model's name; names are {DEMO}, {}", names.join(", "))
}

/// The hub, or the mirror that the user names.
pub fn endpoint() -> String {
    set_variable("HF_ENDPOINT").map_or(HUB.into(), |named| named.trim_end_matches('/').to_owned())
}

/// A variable of the environment. An empty one is unset.
pub fn set_variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// As the hub's own library finds it.
fn hub_cache() -> Result<PathBuf> {
    let home = || {
        let named = set_variable(if cfg!(windows) { "USERPROFILE" } else { "HOME" });
        named.ok_or("there is no home folder; say with --to FOLDER or in HF_HOME where models go")
    };
    if let Some(cache) = set_variable("HF_HUB_CACHE") {
        return Ok(cache.into());
    }
    if let Some(folder) = set_variable("HF_HOME") {
        return Ok(Path::new(&folder).join("hub"));
    }
    let caches =
        set_variable("XDG_CACHE_HOME").map_or_else(|| Ok(Path::new(&home()?).join(".cache")), |c| Ok(c.into()));
    caches.map(|caches: PathBuf| caches.join("huggingface").join("hub")).map_err(|why: &str| why.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_complete() {
        let models = known();
        assert!(models.iter().any(|model| model.name == "seedvr2" && model.size.is_some() && model.sha256.is_some()));
        for model in models {
            let words = [&model.name, &model.title, &model.licence, &model.repository];
            assert!(words.iter().all(|word| !word.is_empty()), "{model:?}");
            assert!(model.path.ends_with(".safetensors") && model.repository.contains('/'), "{model:?}");
            assert!(model.sha256.iter().all(|sum| sum.len() == 64), "{model:?}");
            assert!(named(&model.name).is_some() && model.name != DEMO);
        }
    }
}
