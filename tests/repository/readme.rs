//! The papers are current: the table of parameters in docs/abi.md, the README's C program, and what their links lead
//! to.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::safetensors::Folder;
use crate::common::{library_path, root, small};

#[test]
fn documented_parameters_match_the_node_table() {
    let path = root().join("docs/abi.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let start = text.find("<!-- parameters").unwrap();
    let start = start + text[start..].find("-->\n").unwrap() + 4;
    let end = text.find("<!-- end of parameters -->").unwrap();
    let expected = format!("\n{}\n", video_vae::internals::node::markdown());
    if std::env::var_os("VVAE_UPDATE_README").is_some() {
        std::fs::write(&path, [&text[..start], &expected, &text[end..]].concat()).unwrap();
        return;
    }
    assert!(
        text[start..end] == expected,
        "stale; run: VVAE_UPDATE_README=1 cargo test --release --test repository readme::"
    );
}

#[test]
fn readme_c_program_compiles_and_runs() {
    let text = std::fs::read_to_string(root().join("README.md")).unwrap();
    let program = text.split("```c\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let folder = Folder::new("readme");
    let source = folder.file("demo.c", program.as_bytes());
    let (library, executable) = (library_path(), folder.0.join("demo"));
    let libraries = library.parent().unwrap();
    let compiler = Command::new("cc")
        .args(["-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", "-I"])
        .arg(root().join("include"))
        .arg(&source)
        .arg("-L")
        .arg(libraries)
        .args(["-lvideo_vae", "-o"])
        .arg(&executable)
        .arg(format!("-Wl,-rpath,{}", libraries.display()))
        .output();
    let Ok(compiled) = compiler else {
        assert!(std::env::var_os("CI").is_none(), "no C compiler");
        println!("skipped: no C compiler");
        return;
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let run = Command::new(&executable).arg(small()).output().unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    assert!(said.contains("untiled: exact"), "{said}");
}

/// The Markdown files of a folder, and of those below it if `deep`.
fn papers(folder: &Path, deep: bool) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        match path.is_dir() {
            true if deep => found.extend(papers(&path, deep)),
            false if path.extension().is_some_and(|ext| ext == "md") => found.push(path),
            _ => {}
        }
    }
    found
}

/// What `#...` in a link may name, as GitHub makes it from headings.
fn anchors(text: &str) -> Vec<String> {
    let headings = text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    headings.map(|heading| heading.to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")).collect()
}

#[test]
fn links_lead_to_files_and_headings() {
    let files = [papers(root(), false), papers(&root().join("docs"), true)].concat();
    let (mut seen, mut broken) = (0, Vec::new());
    for file in &files {
        let text = std::fs::read_to_string(file).unwrap();
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for target in targets.filter(|target| !target.contains("://")) {
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let path = if path.is_empty() { file.clone() } else { file.parent().unwrap().join(path) };
            let has_anchor = || anchors(&std::fs::read_to_string(&path).unwrap()).iter().any(|name| name == anchor);
            if !path.exists() || !anchor.is_empty() && !has_anchor() {
                broken.push(format!("{}: {target}", file.display()));
            }
            seen += 1;
        }
    }
    assert!(seen > 100, "{seen} links in {files:?}");
    assert!(broken.is_empty(), "{broken:#?}");
}
