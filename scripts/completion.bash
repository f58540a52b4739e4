# Completes `python -m experiments` and `python -m analysis` with TAB: commands and their options.
# Source it from ~/.bashrc; in zsh after `autoload -U bashcompinit && bashcompinit`.
# shellcheck shell=bash

_fcdp_complete() {
    COMPREPLY=()
    [[ ${COMP_WORDS[1]-} == -m && $COMP_CWORD -ge 3 ]] || return 0
    local module=${COMP_WORDS[2]} found word
    [[ $module == experiments || $module == analysis ]] || return 0
    # Typer asks a variable that is named as the program is, and this one has spaces in its name.
    found=$(env "_PYTHON _M $(tr '[:lower:]' '[:upper:]' <<<"$module")_COMPLETE=complete_bash" \
        COMP_WORDS="${COMP_WORDS[*]:2}" COMP_CWORD=$((COMP_CWORD - 2)) \
        "${COMP_WORDS[0]}" -m "$module" 2>/dev/null) || return 0
    while IFS= read -r word; do
        [[ -z $word ]] || COMPREPLY+=("$word")
    done <<<"$found"
}
complete -o default -F _fcdp_complete python python3
