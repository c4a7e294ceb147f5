"""Other libraries' functions, same names and arguments, computed by tilewise. Nothing is imported until asked for."""
