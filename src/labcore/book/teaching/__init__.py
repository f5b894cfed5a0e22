"""The teaching guide's tables and plans, made from the chapters and labs."""
