# Sourced by the other scripts: Python files of the working directory, where somebody else's recipe may lie beside a yaml.py, do not run.
export PYTHONSAFEPATH=1
# An empty entry, as PYTHONPATH=$PYTHONPATH:/mine leaves one, would be the working directory again.
while [[ ${PYTHONPATH:-} == *::* ]]; do PYTHONPATH=${PYTHONPATH//::/:}; done
PYTHONPATH=${PYTHONPATH:-}
PYTHONPATH=${PYTHONPATH#:}
export PYTHONPATH=${PYTHONPATH%:}
