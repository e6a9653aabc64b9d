//! A model hub on this machine, for `vvae get`: what it was asked, and answers as the test wants them.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// What came in: the first line, and the lines after it in lower case.
#[derive(Debug, Clone)]
pub struct Request {
    pub line: String,
    pub headers: Vec<String>,
}

impl Request {
    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    /// The first byte that is asked for.
    pub fn first(&self) -> Option<usize> {
        self.header("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    }
}

/// An answer: headers with the status line before them, then as much of the body as is sent before the end.
pub struct Answer {
    pub head: String,
    pub body: Vec<u8>,
    /// Whether the connection stays open after it, and says nothing more.
    pub hangs: bool,
}

impl Answer {
    pub fn status(status: &str) -> Answer {
        Answer { head: format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n"), body: Vec::new(), hangs: false }
    }

    /// The contents from a byte on.
    pub fn contents(contents: &[u8], first: Option<usize>) -> Answer {
        let (from, status) = (first.unwrap_or(0), if first.is_some() { "206 Partial Content" } else { "200 OK" });
        let last = contents.len() - 1;
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-length: {}\r\ncontent-range: bytes {from}-{last}/{}\r\n",
            contents.len() - from,
            contents.len()
        );
        Answer { head, body: contents[from..].to_vec(), hangs: false }
    }

    pub fn with(mut self, name: &str, value: &str) -> Answer {
        self.head += &format!("{name}: {value}\r\n");
        self
    }

    /// Only so much of the body.
    pub fn cut(mut self, bytes: usize) -> Answer {
        self.body.truncate(bytes);
        self
    }
}

pub struct Hub {
    pub port: u16,
    asked: Arc<Mutex<Vec<Request>>>,
}

impl Hub {
    /// Answers every request with what `answer` makes of it, for as long as the process runs.
    pub fn start(answer: impl Fn(&Request) -> Answer + Send + 'static) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let (port, asked) = (listener.local_addr().expect("an address").port(), Arc::new(Mutex::new(Vec::new())));
        let known = Arc::clone(&asked);
        std::thread::spawn(move || {
            let mut hanging = Vec::new();
            for stream in listener.incoming().flatten() {
                hanging.extend(serve(stream, &answer, &known));
            }
        });
        Hub { port, asked }
    }

    pub fn address(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn asked(&self) -> Vec<Request> {
        self.asked.lock().expect("no test panics within").clone()
    }
}

/// One request of a connection, and a second one if the first opens a tunnel. The connection, if it is to stay open.
fn serve(
    mut stream: TcpStream,
    answer: &impl Fn(&Request) -> Answer,
    asked: &Mutex<Vec<Request>>,
) -> Option<TcpStream> {
    let mut reader = BufReader::new(stream.try_clone().expect("a second handle"));
    loop {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).ok()? == 0 {
                return None;
            }
            match line.trim_end() {
                "" => break,
                line => lines.push(line.to_owned()),
            }
        }
        let headers = lines[1..].iter().map(|line| line.to_lowercase()).collect();
        let request = Request { line: lines[0].clone(), headers };
        asked.lock().expect("no test panics within").push(request.clone());
        if request.line.starts_with("CONNECT ") {
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").ok()?;
            continue;
        }
        let Answer { head, body, hangs } = answer(&request);
        let body = if request.line.starts_with("HEAD ") { Vec::new() } else { body };
        stream.write_all(format!("{head}connection: close\r\n\r\n").as_bytes()).ok()?;
        stream.write_all(&body).ok()?;
        return hangs.then_some(stream);
    }
}
