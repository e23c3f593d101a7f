from headrace.base.renamed_modules import name_moved_modules

name_moved_modules()
