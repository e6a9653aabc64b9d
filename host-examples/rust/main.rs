//! The `vvae` command.

fn main() -> std::process::ExitCode {
    vvae::main()
}
