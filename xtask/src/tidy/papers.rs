//! The README's table *From the papers*: a row works and names tests that exist, or says "not yet".

use super::files::Sources;

const README: &str = "README.md";
const HEADING: &str = "## From the papers";
const NOT_YET: &str = "not yet";

/// Rows that neither name an existing test nor say "not yet".
pub fn check(sources: &Sources) -> Vec<String> {
    let Some(readme) = sources.0.get(README) else {
        return vec![format!("{README} is missing")];
    };
    let mut violations = Vec::new();
    let mut rows = 0;
    let section = (1..)
        .zip(readme.lines())
        .skip_while(|(_, line)| *line != HEADING)
        .skip(1);
    for (number, line) in section.take_while(|(_, line)| !line.starts_with("## ")) {
        let Some(state) = last_cell(line) else {
            continue;
        };
        rows += 1;
        if state == NOT_YET {
            continue;
        }
        let named: Vec<&str> = state.split('`').skip(1).step_by(2).collect();
        if named.is_empty() {
            violations.push(format!(
                "{README}:{number}: neither a test nor \"{NOT_YET}\""
            ));
        }
        for name in named.into_iter().filter(|name| !exists(sources, name)) {
            violations.push(format!("{README}:{number}: there is no test `{name}`"));
        }
    }
    if rows == 0 {
        violations.push(format!("{README}: no table under \"{HEADING}\""));
    }
    violations
}

/// The last cell of a row of a table; none for its head and the line below it.
fn last_cell(line: &str) -> Option<&str> {
    let inner = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    let cell = inner.rsplit('|').next()?.trim();
    (!cell.is_empty() && !cell.starts_with("--") && cell != "state").then_some(cell)
}

/// `path/file.rs::name` is a test in that file, `name` (or `module::name`) one in any.
fn exists(sources: &Sources, name: &str) -> bool {
    let (place, function) = name.rsplit_once("::").unwrap_or(("", name));
    let mut files = sources.with_extension("", "rs");
    if std::path::Path::new(place)
        .extension()
        .is_some_and(|e| e == "rs")
    {
        return sources
            .0
            .get(place)
            .is_some_and(|text| has_test(text, function));
    }
    files.any(|(_, text)| has_test(text, function))
}

/// Whether `text` has a function of this name with a test attribute on one of the lines above it.
fn has_test(text: &str, function: &str) -> bool {
    let declaration = format!("fn {function}(");
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    lines.iter().enumerate().any(|(at, line)| {
        (line.starts_with(&declaration) || line.starts_with(&format!("pub {declaration}")))
            && lines[..at]
                .iter()
                .rev()
                .take_while(|above| above.starts_with("#[") || above.starts_with("//"))
                .any(|above| *above == "#[test]")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_table(rows: &str) -> Vec<String> {
        let readme = format!(
            "# x\n\n{HEADING}\n\n| what | state |\n| --- | --- |\n{rows}\n## next\n| a | b |\n"
        );
        let code = "#[test]\n#[ignore = \"slow\"]\n/// A test.\nfn there() {}\nfn helper() {}\n";
        check(&Sources(
            [
                (README.to_owned(), readme),
                ("a/t.rs".to_owned(), code.to_owned()),
            ]
            .into(),
        ))
    }

    #[test]
    fn a_row_names_a_test_or_says_not_yet() {
        assert!(check_table("| one | not yet |\n| two | `there`, `a/t.rs::there` |").is_empty());
        assert_eq!(check_table("| one | works |").len(), 1);
        assert_eq!(check_table("| one | `gone` |").len(), 1);
        assert_eq!(check_table("| one | `b/t.rs::there` |").len(), 1);
        // Not a test.
        assert_eq!(check_table("| one | `helper` |").len(), 1);
        assert_eq!(check_table("").len(), 1);
    }
}
