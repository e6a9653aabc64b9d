//! The words after a command: options with values, flags without, and what is left.

use crate::Result;

/// What a command takes.
pub struct Takes {
    /// Names of what must be given, in order, as the help writes them.
    pub required: &'static [&'static str],
    /// May be given after those.
    pub optional: &'static [&'static str],
    /// Options followed by a value.
    pub valued: &'static [&'static [&'static str]],
    pub flags: &'static [&'static str],
}

#[derive(Debug)]
pub struct Args {
    positional: Vec<String>,
    /// In the order given; a later one wins, but for those that add up.
    options: Vec<(&'static str, String)>,
    flags: Vec<&'static str>,
}

impl Args {
    pub fn parse(command: &str, takes: &Takes, words: Vec<String>) -> Result<Args> {
        let mut args = Args { positional: Vec::new(), options: Vec::new(), flags: Vec::new() };
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let Some(body) = word.strip_prefix("--").filter(|body| !body.is_empty()) else {
                if word.starts_with('-') && word.len() > 1 {
                    return Err(unknown(command, takes, &word));
                }
                args.positional.push(word);
                continue;
            };
            let (name, inline) = body.split_once('=').map_or((body, None), |(n, v)| (n, Some(v.to_owned())));
            if let Some(flag) = takes.flags.iter().find(|flag| **flag == name) {
                if inline.is_some() {
                    return Err(format!("--{name} takes no value; write it without \"=\""));
                }
                args.flags.push(flag);
            } else if let Some(option) = takes.valued.iter().copied().flatten().find(|option| **option == name) {
                let value = inline.or_else(|| words.next());
                args.options.push((option, value.ok_or_else(|| format!("--{name} needs a value after it"))?));
            } else {
                return Err(unknown(command, takes, &word));
            }
        }
        args.check_count(command, takes)?;
        Ok(args)
    }

    fn check_count(&self, command: &str, takes: &Takes) -> Result<()> {
        if let Some(missing) = takes.required.get(self.positional.len()) {
            return Err(format!("{missing} is missing; see: vvae {command} --help"));
        }
        match self.positional.get(takes.required.len() + takes.optional.len()) {
            Some(extra) => Err(format!("\"{extra}\" is one word too many; see: vvae {command} --help")),
            None => Ok(()),
        }
    }

    pub fn word(&self, index: usize) -> Option<&str> {
        self.positional.get(index).map(String::as_str)
    }

    pub fn option(&self, name: &str) -> Option<&str> {
        self.options.iter().rev().find(|(option, _)| *option == name).map(|(_, value)| value.as_str())
    }

    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.options.iter().filter(move |(option, _)| *option == name).map(|(_, value)| value.as_str())
    }

    pub fn flag(&self, name: &str) -> bool {
        self.flags.contains(&name)
    }

    /// An option's value, or what it is when not given.
    pub fn parsed<T: std::str::FromStr>(&self, name: &str, default: T, example: &str) -> Result<T> {
        let Some(text) = self.option(name) else { return Ok(default) };
        text.parse().map_err(|_| format!("--{name}: \"{text}\" cannot be read; write it like {example}"))
    }

    /// An option's value, which must be one of these words; the first if not given.
    pub fn choice(&self, name: &str, words: &[&'static str]) -> Result<&'static str> {
        let Some(text) = self.option(name) else { return Ok(words[0]) };
        words
            .iter()
            .copied()
            .find(|word| *word == text)
            .ok_or_else(|| format!("--{name}: \"{text}\" is none of {}", words.join(", ")))
    }
}

fn unknown(command: &str, takes: &Takes, word: &str) -> String {
    let names: Vec<_> = takes.valued.iter().copied().flatten().chain(takes.flags).map(|n| format!("--{n}")).collect();
    let known = if names.is_empty() { "no options".into() } else { format!("the options {}", names.join(", ")) };
    format!("vvae {command} does not know {word}; it has {known}")
}
