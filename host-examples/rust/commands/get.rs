//! `vvae get`: a published checkpoint by its name.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};

use video_vae::internals::model::families::FAMILIES;

use crate::download::{Client, Remote, sha256};
use crate::models::{self, Model};
use crate::progress::{Progress, Unit};
use crate::say::say;
use crate::{Result, draft, interrupt, units};

const EXAMPLES: &str = "Examples:
  vvae get                             # the names, and which of them are here
  vvae get seedvr2
  vvae get flux --comfyui ~/ComfyUI --yes
  HF_ENDPOINT=https://mirror.example vvae get wan21 --to /models

Environment:
  HF_HOME, HF_HUB_CACHE   the hub's folders, where models go without --to; --weights NAME looks there
  HF_ENDPOINT             another server than https://huggingface.co
  HF_TOKEN                for models whose licence has to be accepted; sent to that server alone
  HTTPS_PROXY, NO_PROXY   as other programs have them
";

/// Downloads a published checkpoint; --weights NAME finds it then.
///
/// Says source and licence, asks, and downloads. A download that was cut short is continued by the same command. Size
/// and SHA-256 are checked against those that are known, or that the hub tells. Nothing else in this command uses the
/// network.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Get {
    /// The model; without it: all names.
    name: Option<String>,
    /// A folder, or the name of the file; without it: the hub's own cache.
    #[arg(long, value_name = "PATH")]
    to: Option<PathBuf>,
    /// ComfyUI's folder; the file goes into its models/vae.
    #[arg(long, value_name = "FOLDER", conflicts_with = "to")]
    comfyui: Option<PathBuf>,
    /// Do not ask.
    #[arg(long)]
    yes: bool,
}

/// Where a file goes.
enum Place {
    /// The folder of its repository in the hub's cache.
    Cache(PathBuf),
    File(PathBuf),
}

impl Get {
    pub fn run(self) -> Result<()> {
        let Some(name) = &self.name else { return list() };
        if name == models::DEMO {
            return say!("{}: it comes with this command; nothing to download", models::demo_weights()?.display());
        }
        let model = models::named(name).ok_or_else(|| unknown(name))?;
        let place = self.place(&model)?;
        if let Some(path) = already(&model, &place)? {
            return say!("{}: it is here already, {}", path.display(), usage(&model, &place));
        }
        say!("{}\n  licence  {}\n  source   {}", model.title, model.licence, model.page())?;
        let client = Client::new()?;
        let remote = client.describe(&model.address())?;
        check_known(&model, &remote)?;
        say!("  size     {}\n  goes to  {}", units::bytes(remote.size), place.folder().display())?;
        if !self.yes {
            ask()?;
        }
        let (part, lock) = place.part(&model, &remote)?;
        interrupt::leaves("what came is kept; the same command goes on");
        complete(&client, &model, &remote, &part, lock)?;
        let path = place.finish(&model, &remote, &part)?;
        say!("{}: whole, {}; {}", path.display(), checked(&remote, &model), usage(&model, &place))
    }

    fn place(&self, model: &Model) -> Result<Place> {
        match (&self.to, &self.comfyui) {
            (Some(to), _) if to.is_dir() || ends_with_separator(to) => Ok(Place::File(to.join(model.file_name()))),
            (Some(to), _) => Ok(Place::File(to.clone())),
            (None, Some(comfyui)) => {
                let folder = comfyui.join("models").join("vae");
                if !folder.is_dir() {
                    return Err(format!("{} is no folder; name ComfyUI's own with --comfyui", folder.display()));
                }
                Ok(Place::File(folder.join(model.file_name())))
            }
            (None, None) => model.folder().map(Place::Cache),
        }
    }
}

impl Place {
    fn folder(&self) -> &Path {
        match self {
            Place::Cache(folder) => folder,
            Place::File(file) => {
                file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
            }
        }
    }

    /// The unfinished file under the name that the hub's own programs give it, locked for this process.
    fn part(&self, model: &Model, remote: &Remote) -> Result<(PathBuf, File)> {
        let folder = match self {
            Place::Cache(folder) => folder.join("blobs"),
            Place::File(_) => self.folder().to_owned(),
        };
        let failed =
            |why: std::io::Error| format!("{} cannot be written: {why}; name another with --to", folder.display());
        fs::create_dir_all(&folder).map_err(failed)?;
        let path = folder.join(format!("{}.incomplete", remote.etag));
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => Ok((path, file)),
            Err(fs::TryLockError::WouldBlock) => Err(format!("another process downloads {}; wait for it", model.name)),
            // Some file systems know no locks.
            Err(fs::TryLockError::Error(_)) => Ok((path, file)),
        }
    }

    /// Gives the whole file its name.
    fn finish(&self, model: &Model, remote: &Remote, part: &Path) -> Result<PathBuf> {
        let failed = |why: std::io::Error| format!("{} cannot be given its name: {why}", part.display());
        let folder = match self {
            Place::Cache(folder) => folder,
            Place::File(file) => return fs::rename(part, file).map(|()| file.clone()).map_err(failed),
        };
        // The layout of the hub's own programs, which then need not download it again.
        let commit = remote
            .commit
            .as_deref()
            .ok_or_else(|| format!("{} does not say which version it sends; add --to FOLDER", models::endpoint()))?;
        let link = folder.join("snapshots").join(commit).join(&model.path);
        let _ = fs::create_dir_all(link.parent().unwrap_or(folder));
        let _ = fs::remove_file(&link);
        put(part, &folder.join("blobs").join(&remote.etag), &link, model.path.split('/').count()).map_err(failed)?;
        let main = folder.join("refs").join("main");
        let _ = fs::create_dir_all(folder.join("refs"));
        fs::write(&main, commit).map_err(|why| format!("{} cannot be written: {why}", main.display()))?;
        Ok(link)
    }
}

/// The contents under their checksum, and a link to them. `depth`: of the link below its version's folder.
#[cfg(unix)]
fn put(part: &Path, blob: &Path, link: &Path, depth: usize) -> std::io::Result<()> {
    fs::rename(part, blob)?;
    let above: PathBuf = std::iter::repeat_n("..", depth + 1).collect();
    std::os::unix::fs::symlink(above.join("blobs").join(blob.file_name().unwrap_or_default()), link)
}

/// Where links need rights that users lack, the hub's own programs put the file itself there.
#[cfg(not(unix))]
fn put(part: &Path, _: &Path, link: &Path, _: usize) -> std::io::Result<()> {
    fs::rename(part, link)
}

/// Downloads what is missing, and checks all of it.
fn complete(client: &Client, model: &Model, remote: &Remote, part: &Path, mut file: File) -> Result<()> {
    let mut progress = Progress::of(Unit::Bytes, model.name.clone(), Some(remote.size));
    client.fetch(&model.address(), remote, &mut file, &mut progress)?;
    progress.end();
    file.sync_all().map_err(|why| format!("{} cannot be written: {why}; make room", part.display()))?;
    let Some(wanted) = remote.sha256.as_ref().or(model.sha256.as_ref()) else { return Ok(()) };
    let found = sha256(part).map_err(|why| format!("{} cannot be read: {why}", part.display()))?;
    if found == *wanted {
        return Ok(());
    }
    interrupt::remove(part);
    Err(format!("{} has SHA-256 {found}, expected {wanted}; it was removed, download it again", model.name))
}

/// The file, if it lies in its place. One with other contents is replaced with -y only.
fn already(model: &Model, place: &Place) -> Result<Option<PathBuf>> {
    let path = match place {
        Place::Cache(_) => return Ok(model.find()),
        Place::File(path) => path,
    };
    if !path.is_file() {
        return Ok(None);
    }
    let sum = sha256(path).map_err(|why| format!("{} cannot be read: {why}", path.display()))?;
    if model.sha256.as_ref() == Some(&sum) {
        return Ok(Some(path.clone()));
    }
    draft::refuse_existing(path).map(|()| None)
}

/// A server must have the file that is known by its checksum.
fn check_known(model: &Model, remote: &Remote) -> Result<()> {
    let differs = |known: &Option<String>| known.is_some() && remote.sha256.is_some() && *known != remote.sha256;
    if differs(&model.sha256) || model.size.is_some_and(|size| size != remote.size) {
        return Err(format!(
            "{} has another {} ({}, SHA-256 {}) than the one that is known ({}, SHA-256 {}); nothing was downloaded",
            models::endpoint(),
            model.file_name(),
            units::bytes(remote.size),
            remote.sha256.as_deref().unwrap_or("not told"),
            model.size.map(units::bytes).unwrap_or_default(),
            model.sha256.as_deref().unwrap_or("not known"),
        ));
    }
    Ok(())
}

fn checked(remote: &Remote, model: &Model) -> &'static str {
    match remote.sha256.as_ref().or(model.sha256.as_ref()) {
        Some(_) => "size and SHA-256 checked",
        None => "size checked; the server tells no SHA-256",
    }
}

fn usage(model: &Model, place: &Place) -> String {
    match place {
        Place::Cache(_) => format!("use it with --weights {}", model.name),
        Place::File(path) => format!("use it with --weights {}", path.display()),
    }
}

fn ask() -> Result<()> {
    if !std::io::stdin().is_terminal() {
        return Err("add --yes to download without being asked; standard input is no terminal".into());
    }
    eprint!("Download it? [y/N] ");
    let _ = std::io::stderr().flush();
    let mut answer = String::new();
    let _ = std::io::stdin().lock().read_line(&mut answer);
    if matches!(answer.trim(), "y" | "Y" | "yes") { Ok(()) } else { Err("nothing was downloaded".into()) }
}

fn list() -> Result<()> {
    for model in models::known() {
        let here = model.find().map(|path| format!("\n{:13}{}", "", path.display())).unwrap_or_default();
        say!("{:<12} {} ({})\n{:13}{}{here}", model.name, model.title, model.licence, "", model.page())?;
    }
    say!("{:<12} of `vvae demo`, a toy; comes with this command", models::DEMO)
}

fn unknown(name: &str) -> String {
    if FAMILIES.iter().flat_map(|family| family.published).any(|model| model.name == name) {
        return format!(
            "\"{name}\" has no address here yet; get its file from its makers and give it with --weights FILE"
        );
    }
    let names: Vec<String> = models::known().into_iter().map(|model| model.name).collect();
    format!("\"{name}\" is no model with an address here; there are {}", names.join(", "))
}

fn ends_with_separator(path: &Path) -> bool {
    path.as_os_str().to_string_lossy().ends_with(std::path::is_separator)
}
