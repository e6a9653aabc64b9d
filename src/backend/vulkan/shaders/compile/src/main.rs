//! Writes what the shaders compile to, or with `--check` compares it with what is committed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use glslang::{
    Compiler, CompilerOptions, ShaderInput, ShaderMessage, ShaderSource, ShaderStage, SourceLanguage, SpirvVersion,
    Target, VulkanVersion,
};

type Define = (&'static str, Option<&'static str>);

/// Kernels of elements: one file for each precision.
const OF_ELEMENTS: [&str; 9] = ["attention", "norm", "norm_pixel", "cache_u8", "load", "store", "blend", "pool", "add"];
const PRECISIONS: [(&str, &str); 3] = [("fp16", "VVAE_FP16"), ("bf16", "VVAE_BF16"), ("fp32", "VVAE_FP32")];
/// Output channels of a convolution's tile.
const TILES: [&str; 3] = ["32", "96", "128"];
/// What matrix units multiply: `attention_matrix` and `conv_matrix` are of these.
const OF_MATRICES: [&str; 2] = ["fp16", "bf16"];
const OF_FLOATS: [&str; 2] = ["finalize", "copy_rows"];

struct Kernel {
    source: &'static str,
    output: String,
    defines: Vec<Define>,
}

fn kernels() -> Vec<Kernel> {
    let mut all = Vec::new();
    for (precision, define) in PRECISIONS {
        for source in OF_ELEMENTS {
            all.push(Kernel { source, output: format!("{source}.{precision}"), defines: vec![(define, None)] });
        }
        for tile in TILES {
            let defines = vec![(define, None), ("TILE_CHANNELS", Some(tile))];
            all.push(Kernel { source: "conv", output: format!("conv_{tile}.{precision}"), defines: defines.clone() });
            if OF_MATRICES.contains(&precision) {
                all.push(Kernel { source: "conv_matrix", output: format!("conv_matrix_{tile}.{precision}"), defines });
            }
        }
        if OF_MATRICES.contains(&precision) {
            let output = format!("attention_matrix.{precision}");
            all.push(Kernel { source: "attention_matrix", output, defines: vec![(define, None)] });
        }
    }
    let floats = || vec![(PRECISIONS[2].1, None)];
    all.extend(OF_FLOATS.map(|source| Kernel { source, output: source.into(), defines: floats() }));
    all
}

/// A file with those that it includes in their places.
fn source(folder: &Path, name: &str) -> String {
    let path = folder.join(name);
    let text = fs::read_to_string(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
    let line = |line: &str| match line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) {
        Some(included) => source(folder, included),
        None => format!("{line}\n"),
    };
    text.lines().filter(|line| !line.contains("GL_GOOGLE_include_directive")).map(line).collect()
}

fn compile(compiler: &Compiler, folder: &Path, kernel: &Kernel) -> Vec<u8> {
    let text = ShaderSource::from(source(folder, &format!("{}.comp", kernel.source)));
    let options = CompilerOptions {
        source_language: SourceLanguage::GLSL,
        target: Target::Vulkan { version: VulkanVersion::Vulkan1_3, spirv_version: SpirvVersion::SPIRV1_6 },
        version_profile: None,
        messages: ShaderMessage::DEFAULT,
    };
    let input = ShaderInput::new(&text, ShaderStage::Compute, &options, Some(&kernel.defines[..]), None);
    let compiled = input.and_then(|input| compiler.create_shader(input)).and_then(|shader| shader.compile());
    let words = compiled.unwrap_or_else(|why| panic!("{}: {why}", kernel.output));
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

fn main() -> ExitCode {
    let checks = std::env::args().skip(1).any(|argument| argument == "--check");
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().expect("the shaders' folder").to_owned();
    let compiler = Compiler::acquire().expect("glslang starts");
    let (output, mut names) = (folder.join("spirv"), Vec::new());
    fs::create_dir_all(&output).expect("spirv/ can be made");
    let mut stale = false;
    for kernel in kernels() {
        let name = format!("{}.spv", kernel.output);
        let (path, code) = (output.join(&name), compile(compiler, &folder, &kernel));
        names.push(name);
        if checks && fs::read(&path).is_ok_and(|committed| committed == code) {
            continue;
        }
        if checks {
            eprintln!("{} is not what {}.comp compiles to; run without --check", path.display(), kernel.source);
            stale = true;
        } else {
            fs::write(&path, code).expect("spirv/ can be written");
        }
    }
    for entry in fs::read_dir(&output).expect("spirv/ can be read").flatten() {
        if !names.iter().any(|name| entry.file_name() == name.as_str()) {
            eprintln!("{} is of no kernel", entry.path().display());
            stale = true;
        }
    }
    if stale { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
