//! Rules about every file: length, and nothing left for later.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Longer files need an entry in the ratchet.
const LIMIT: usize = 600;
/// Files that were too long once, each with the length it may have; may only shrink.
const RATCHET: &str = ".ci/long-files.txt";
const SKIPPED: &[&str] = &["target", ".git"];
/// The text files the rules are about.
const KINDS: &[&str] = &["rs", "c", "h", "lua", "md", "toml", "sh", "yml"];

/// Every text file of the repository by its path from the root.
pub struct Sources(pub BTreeMap<String, String>);

impl Sources {
    pub fn read(root: &Path) -> Result<Self> {
        let mut files = BTreeMap::new();
        let mut open = vec![PathBuf::new()];
        while let Some(directory) = open.pop() {
            let entries = fs::read_dir(root.join(&directory))
                .with_context(|| directory.display().to_string())?;
            for entry in entries {
                let entry = entry?;
                let path = directory.join(entry.file_name());
                let kind = entry.file_type()?;
                if kind.is_dir() && !SKIPPED.iter().any(|s| path.file_name() == Some(s.as_ref())) {
                    open.push(path);
                } else if kind.is_file()
                    && KINDS.iter().any(|k| path.extension() == Some(k.as_ref()))
                {
                    let text = fs::read_to_string(root.join(&path))
                        .with_context(|| path.display().to_string())?;
                    files.insert(path.display().to_string(), text);
                }
            }
        }
        Ok(Self(files))
    }

    /// Files with this extension, below this folder (`""` for all).
    pub fn with_extension<'a>(
        &'a self,
        below: &'a str,
        extension: &'a str,
    ) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.0
            .iter()
            .filter(move |(path, _)| {
                path.starts_with(below)
                    && Path::new(path).extension().is_some_and(|e| e == extension)
            })
            .map(|(path, text)| (path.as_str(), text.as_str()))
    }
}

/// Code files over the limit, unless the ratchet allows them; a ratchet that could be tighter is a violation too.
pub fn too_long(sources: &Sources, root: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(root.join(RATCHET)).with_context(|| RATCHET.to_owned())?;
    let mut allowed = ratchet(&text)?;
    let mut violations = Vec::new();
    let code = ["rs", "c", "h"]
        .iter()
        .flat_map(|e| sources.with_extension("", e));
    for (path, text) in code {
        let lines = text.lines().count();
        match allowed.remove(path) {
            Some(limit) if lines > limit => {
                violations.push(format!("{path}: {lines} lines, {RATCHET} allows {limit}"));
            }
            Some(limit) if lines < limit || lines <= LIMIT => violations.push(format!(
                "{path}: {lines} lines; {RATCHET} still says {limit}: lower it, or remove it below {LIMIT}"
            )),
            None if lines > LIMIT => {
                violations.push(format!("{path}: {lines} lines, the limit is {LIMIT}: split it"));
            }
            Some(_) | None => {}
        }
    }
    violations.extend(
        allowed
            .keys()
            .map(|path| format!("{RATCHET}: {path} is gone, remove it")),
    );
    Ok(violations)
}

fn ratchet(text: &str) -> Result<BTreeMap<&str, usize>> {
    text.lines()
        .filter(|line| !line.trim().is_empty() && !line.starts_with('#'))
        .map(|line| {
            let (path, lines) = line
                .split_once(' ')
                .with_context(|| format!("{RATCHET}: {line:?} is not `path lines`"))?;
            match lines.trim().parse() {
                Ok(lines) => Ok((path, lines)),
                Err(_) => bail!("{RATCHET}: {lines:?} is not a number of lines"),
            }
        })
        .collect()
}

/// Marks that say "later".
pub fn leftovers(sources: &Sources) -> Vec<String> {
    // Written so that this file does not find itself.
    let marks = [
        ["TO", "DO"].concat(),
        ["FIX", "ME"].concat(),
        ["todo", "!("].concat(),
        ["unimplemented", "!("].concat(),
    ];
    let mut violations = Vec::new();
    for (path, text) in &sources.0 {
        for (number, line) in (1..).zip(text.lines()) {
            if let Some(mark) = marks.iter().find(|mark| line.contains(mark.as_str())) {
                violations.push(format!("{path}:{number}: {mark}"));
            }
        }
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(files: &[(&str, String)]) -> Sources {
        Sources(
            files
                .iter()
                .map(|(p, t)| ((*p).to_owned(), t.clone()))
                .collect(),
        )
    }

    fn long_files(ratchet: &str, lines: usize) -> Vec<String> {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join(".ci")).unwrap();
        fs::write(root.path().join(RATCHET), ratchet).unwrap();
        too_long(&sources(&[("a/b.rs", "x\n".repeat(lines))]), root.path()).unwrap()
    }

    #[test]
    fn long_files_need_an_entry_that_only_shrinks() {
        assert!(long_files("", 600).is_empty());
        assert_eq!(long_files("", 601).len(), 1);
        assert!(long_files("# why\na/b.rs 700\n", 700).is_empty());
        // Grown, shrunk, short enough, gone.
        assert_eq!(long_files("a/b.rs 700\n", 701).len(), 1);
        assert_eq!(long_files("a/b.rs 700\n", 650).len(), 1);
        assert_eq!(long_files("a/b.rs 600\n", 600).len(), 1);
        assert_eq!(long_files("a/c.rs 700\n", 10).len(), 1);
    }

    #[test]
    fn leftovers_are_found_with_their_line() {
        let text = format!("fine\n// {}: later\n", ["TO", "DO"].concat());
        let found = leftovers(&sources(&[("a.rs", text)]));
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("a.rs:2"));
    }
}
