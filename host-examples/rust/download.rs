//! A file from the model hub, in pieces if need be. Knows addresses and files, not models.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ureq::http::Response;
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, Body};

use crate::models::{endpoint, set_variable};
use crate::progress::Progress;
use crate::{Result, interrupt};

/// Attempts in a row that bring nothing.
const TRIES: u32 = 5;
/// A server that says nothing for so long is gone.
const PATIENCE: Duration = Duration::from_secs(60);
/// Answers that send elsewhere, before one that tells of the file.
const MOST_REDIRECTS: usize = 5;

pub struct Client {
    agent: Agent,
    token: Option<String>,
}

/// What a server says of a file.
#[derive(Debug)]
pub struct Remote {
    pub size: u64,
    /// Of large files the hub tells it.
    pub sha256: Option<String>,
    /// The server's name for these contents.
    pub etag: String,
    /// The version of the repository, as the hub tells it.
    pub commit: Option<String>,
}

/// Why a piece did not come.
enum Failure {
    /// The next attempt may bring more.
    Passing(String),
    Lasting(String),
}

impl Client {
    /// Trusts the certificates that the system trusts. Proxies are those of the environment.
    pub fn new() -> Result<Client> {
        let found = rustls_native_certs::load_native_certs().certs;
        let roots: Vec<Certificate<'static>> =
            found.iter().map(|cert| Certificate::from_der(cert).to_owned()).collect();
        if roots.is_empty() && endpoint().starts_with("https") {
            return Err(
                "this system has no certificates to trust; install ca-certificates, or name a file of them in \
                        SSL_CERT_FILE"
                    .into(),
            );
        }
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::Specific(Arc::new(roots)))
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .build();
        let config = Agent::config_builder()
            .tls_config(tls)
            .http_status_as_error(false)
            .redirect_auth_headers(ureq::config::RedirectAuthHeaders::SameHost)
            .user_agent(concat!("vvae/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(PATIENCE))
            .timeout_recv_response(Some(PATIENCE))
            .timeout_per_read(Some(PATIENCE));
        Ok(Client { agent: config.build().new_agent(), token: set_variable("HF_TOKEN") })
    }

    /// Asks for size and checksum. The hub tells both before it sends elsewhere for the contents.
    pub fn describe(&self, address: &str) -> Result<Remote> {
        let mut address = address.to_owned();
        for _ in 0..MOST_REDIRECTS {
            let request = self.agent.head(&address).config().max_redirects(0).build();
            let request =
                self.bearer(&address).into_iter().fold(request, |request, it| request.header("authorization", it));
            let answer = request.call().map_err(|why| unreachable(&address, &why))?;
            let status = answer.status().as_u16();
            match header(&answer, "location") {
                Some(location) if status / 100 == 3 && header(&answer, "x-linked-etag").is_none() => {
                    address = joined(&address, location)?;
                }
                _ if status / 100 == 2 || status / 100 == 3 => return told(&address, &answer),
                _ => return Err(refused(&address, status, self.token.is_some())),
            }
        }
        Err(format!("{address}: the server sends from one address to another; try again later"))
    }

    /// The user's token goes to the hub alone.
    fn bearer(&self, address: &str) -> Option<String> {
        let at_hub = host(address) == host(&endpoint());
        self.token.as_ref().filter(|_| at_hub).map(|token| format!("Bearer {token}"))
    }

    /// Adds what is missing to a file that has the first part, or nothing.
    pub fn fetch(&self, address: &str, remote: &Remote, part: &mut File, progress: &mut Progress) -> Result<()> {
        let length =
            |file: &File| file.metadata().map(|found| found.len()).map_err(|why| format!("the part is lost: {why}"));
        let mut tries = 0;
        loop {
            let have = length(part)?;
            if have == remote.size {
                return Ok(());
            }
            if have > remote.size {
                part.set_len(0).map_err(full)?;
                continue;
            }
            let why = match self.append(address, have, part, progress) {
                Ok(()) => "the connection was closed early".to_owned(),
                Err(Failure::Passing(why)) => why,
                Err(Failure::Lasting(why)) => return Err(why),
            };
            interrupt::check()?;
            tries = if length(part)? > have { 0 } else { tries + 1 };
            if tries == TRIES {
                return Err(format!("{why}; the part that is there is kept, the same command goes on"));
            }
            std::thread::sleep(Duration::from_millis(if tries > 0 { 250 << tries } else { 0 }));
        }
    }

    /// One request for the bytes from `have` on.
    fn append(
        &self,
        address: &str,
        have: u64,
        part: &mut File,
        progress: &mut Progress,
    ) -> std::result::Result<(), Failure> {
        let mut request = self.agent.get(address);
        if let Some(bearer) = self.bearer(address) {
            request = request.header("authorization", bearer);
        }
        if have > 0 {
            request = request.header("range", format!("bytes={have}-"));
        }
        let answer = request.call().map_err(|why| Failure::Passing(unreachable(address, &why)))?;
        match answer.status().as_u16() {
            206 if header(&answer, "content-range")
                .is_some_and(|range| range.starts_with(&format!("bytes {have}-"))) => {}
            // All of it, or a part that was not asked for: from the beginning.
            200 | 206 | 416 => part.set_len(0).map_err(|why| Failure::Lasting(full(why)))?,
            status @ (429 | 500..=599) => return Err(Failure::Passing(refused(address, status, self.token.is_some()))),
            status => return Err(Failure::Lasting(refused(address, status, self.token.is_some()))),
        }
        if answer.status().as_u16() == 416 {
            return Ok(());
        }
        let mut at = part.seek(SeekFrom::End(0)).map_err(|why| Failure::Lasting(full(why)))?;
        let (mut body, mut piece) = (answer.into_body().into_reader(), vec![0; 1 << 18]);
        loop {
            interrupt::check().map_err(Failure::Lasting)?;
            let count = match body.read(&mut piece) {
                Ok(0) => return Ok(()),
                Ok(count) => count,
                Err(why) => return Err(Failure::Passing(format!("{}: {why}", host(address)))),
            };
            part.write_all(&piece[..count]).map_err(|why| Failure::Lasting(full(why)))?;
            at += count as u64;
            progress.show(at);
        }
    }
}

fn header<'a>(answer: &'a Response<Body>, name: &str) -> Option<&'a str> {
    answer.headers().get(name).and_then(|value| value.to_str().ok())
}

fn told(address: &str, answer: &Response<Body>) -> Result<Remote> {
    let size = header(answer, "x-linked-size").or(header(answer, "content-length")).and_then(|size| size.parse().ok());
    let size =
        size.ok_or_else(|| format!("{address}: the server does not say how large the file is; try again later"))?;
    let etag = header(answer, "x-linked-etag").or(header(answer, "etag")).unwrap_or_default();
    let etag = etag.trim_start_matches("W/").trim_matches('"').to_owned();
    let is_name = !etag.is_empty() && etag.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    if !is_name {
        return Err(format!("{address}: the server does not say which version this is; name another in HF_ENDPOINT"));
    }
    let is_sum = etag.len() == 64 && etag.bytes().all(|byte| byte.is_ascii_hexdigit());
    let commit = header(answer, "x-repo-commit").filter(|commit| commit.bytes().all(|byte| byte.is_ascii_hexdigit()));
    Ok(Remote { size, sha256: is_sum.then(|| etag.to_lowercase()), etag, commit: commit.map(str::to_owned) })
}

fn host(address: &str) -> &str {
    address.split("://").nth(1).unwrap_or(address).split('/').next().unwrap_or(address)
}

/// Where an answer sends to.
fn joined(address: &str, location: &str) -> Result<String> {
    if location.starts_with("http://") || location.starts_with("https://") {
        return Ok(location.to_owned());
    }
    let scheme = address.split("://").next().unwrap_or("https");
    match location.strip_prefix('/') {
        Some(path) => Ok(format!("{scheme}://{}/{path}", host(address))),
        None => Err(format!("{address}: the server sends to {location:?}, which is no address; try again later")),
    }
}

fn unreachable(address: &str, why: &ureq::Error) -> String {
    format!(
        "{} cannot be reached ({why}); check the network, name a proxy in HTTPS_PROXY or a mirror in HF_ENDPOINT, or \
         download {address} elsewhere",
        host(address)
    )
}

fn refused(address: &str, status: u16, has_token: bool) -> String {
    let remedy = match status {
        401 | 403 if has_token => "check HF_TOKEN, and accept the model's licence on its page",
        401 | 403 => "accept the model's licence on its page, and set HF_TOKEN to a token of yours",
        404 => "the file was moved or removed; look for it there, and name it with --weights FILE",
        _ => "try again later",
    };
    format!("{address}: the server answers {status}; {remedy}")
}

fn full(why: std::io::Error) -> String {
    format!("the download cannot be written: {why}; make room, the same command goes on")
}

/// SHA-256 of a file, as 64 hexadecimal digits.
pub fn sha256(path: &Path) -> std::io::Result<String> {
    use sha2::{Digest, Sha256};
    let (mut file, mut sum, mut piece) = (File::open(path)?, Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect()),
            count => sum.update(&piece[..count]),
        }
    }
}
