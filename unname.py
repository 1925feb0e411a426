"""Remove time_dim= and steps= from calls of reroll.compile and of helpers: python unname.py FILES."""
import ast, sys
def is_compile(f):
    return (isinstance(f, ast.Attribute) and f.attr == 'compile' and isinstance(f.value, ast.Name) and f.value.id == 'reroll')
for path in sys.argv[1:]:
    s = open(path).read()
    if 'time_dim' not in s and 'steps=' not in s: continue
    while True:
        try: tree = ast.parse(s)
        except SyntaxError as e: print(path, e); break
        lines = s.splitlines(keepends=True); starts=[0]
        for l in lines: starts.append(starts[-1]+len(l.encode()))
        b = s.encode(); pos=lambda ln,col: starts[ln-1]+col
        done=True
        for c in ast.walk(tree):
            if not isinstance(c, ast.Call): continue
            partial = isinstance(c.func,(ast.Name,ast.Attribute)) and getattr(c.func,'id',getattr(c.func,'attr',''))=='partial' and c.args and is_compile(c.args[0])
            names = {'time_dim','steps'} if is_compile(c.func) or partial else {'time_dim'}
            for k in c.keywords:
                if k.arg in names:
                    a0=pos(k.lineno,k.col_offset); a1=pos(k.value.end_lineno,k.value.end_col_offset)
                    rest=b[a1:]; 
                    j=0
                    while rest[j:j+1] in b' \n\t': j+=1
                    if rest[j:j+1]==b',':
                        j+=1
                        while rest[j:j+1] in (b' ',): j+=1
                        b=b[:a0]+rest[j:]
                    else:
                        i=a0
                        while b[i-1:i] in b' \n\t' and i: i-=1
                        if b[i-1:i]==b',': i-=1
                        b=b[:i]+rest
                    s=b.decode(); done=False; break
            if not done: break
        if done: break
    open(path,'w').write(s)
